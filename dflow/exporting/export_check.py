"""Checks of an export before its functions are made: the parts agree, and each has the declared form.

Why: a directory may come from anywhere. Invariant: functions made of a manifest and programs that pass can be called.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from dflow.exporting.export_manifest import (
    ExportManifest,
    FunctionSignature,
    PartEntry,
    arguments_of,
    open_sizes_of,
    signature_refusal,
)
from dflow.exporting.exported_call import python_signature
from dflow.lowering.programs.portable_tree import (
    Dict,
    Held,
    NamedTuple,
    Tree,
    build,
    parts_of,
    parts_of_type,
    plain,
    program_leaves_of,
)
from dflow.tracing.ir.types import array_type_of, dtype_name
from dflow.tracing.rows.slices import have_each_once

_IDS = re.compile(r"[iu]\d+\[\]")

#: Most levels of a tree.
_MOST_DEPTH = 64


def check_manifest(manifest: ExportManifest) -> None:
    """Raise ValueError, with the reason, if parts of a manifest contradict each other or are invalid."""
    for name, signature in manifest.signatures.items():
        if refusal := signature_refusal(name):
            raise ValueError(refusal)
        _check_names(f"{name} uses", signature.variables, manifest.variables)
        _check_names(f"{name} uses", signature.constants.values(), manifest.constants)
        _check_names(f"{name} uses", signature.writes, signature.variables)
        sizes = open_sizes_of(signature.parameters)
        for check in signature.checks.values():
            is_size = check.rows in sizes if isinstance(check.rows, str) else check.rows >= 1
            if not is_size or not _IDS.fullmatch(check.type):
                raise ValueError(f"{name} checks ids {check.type} of {check.rows} rows")
        if signature.lookups is not None:
            _check_lookups(name, signature, signature.lookups.tables, manifest)
        if not signature.platforms:
            raise ValueError(f"{name} is for no platform")
        for tree in (*(parameter.tree for parameter in signature.parameters), signature.result):
            for node in _nodes(tree):
                _check_node(name, node, manifest)
        python_signature(signature.parameters)
    for array, parts in manifest.parts().items():
        _check_parts(array, parts.values(), manifest)


def _check_lookups(name: str, signature: FunctionSignature, tables: Sequence[str], manifest: ExportManifest) -> None:
    _check_names(f"{name} looks up in", tables, signature.variables)
    if not tables or {*tables} & {*signature.writes}:
        raise ValueError(f"{name} looks up in no table, or in one that it writes")
    if any(len(parts_of_type(manifest.variables[table].type)[1]) < 2 for table in tables):
        raise ValueError(f"{name} looks up in a table of fewer than two dimensions")
    assert signature.lookups is not None
    for table, how in signature.lookups.id_rows.items():
        _check_names(f"{name} looks ids up in", [table], tables)
        _check_names(f"{name} finds ids by", how.variables, signature.variables)
        if how.settings[2] < 1 or not 0 <= how.first < how.buckets:
            raise ValueError(f"{name} finds ids of {table!r} in no bucket")


def _check_parts(array: str, parts: Collection[PartEntry], manifest: ExportManifest) -> None:
    first = next(iter(parts))
    is_one = {(one.axis, *one.shape) for one in parts} == {
        (first.axis, *first.shape)
    } and array not in manifest.variables
    if not is_one or not 0 <= first.axis < len(first.shape):
        raise ValueError(f"variables have parts of {array!r}, and do not agree on it")
    if not have_each_once([one.indices for one in parts], first.shape[first.axis]):
        raise ValueError(f"variables have parts of {array!r}, and not each part once")


def _check_names(subject: str, names: Any, known: Any) -> None:
    if unknown := sorted({*names} - {*known}):
        raise ValueError(f"{subject} {unknown[0]!r}, and says nothing else of it")


def _nodes(tree: Tree, depth: int = 0) -> Iterator[Tree]:
    if depth > _MOST_DEPTH:
        raise ValueError(f"it has a tree of more than {_MOST_DEPTH} levels")
    yield tree
    for _, child in parts_of(tree):
        yield from _nodes(child, depth + 1)


def _check_node(name: str, node: Tree, manifest: ExportManifest) -> None:
    match node:
        case Held(variable):
            _check_names(f"{name} returns", [variable], manifest.variables)
        case Dict(of) if len({str(key) for key, _ in of}) < len(of):
            raise ValueError(f"{name} has a dict with a key twice")
        case NamedTuple(kind, of):
            namedtuple(kind, [field for field, _ in of])


def check_program(manifest: ExportManifest, signature: FunctionSignature, program: jax.export.Exported) -> None:
    """Raise ValueError unless the inputs and outputs of the program are those in the manifest."""
    state = {name: manifest.variables[name].type for name in signature.variables}
    constants = {name: manifest.constants[stored] for name, stored in signature.constants.items()}
    args, named = _types(arguments_of(signature.parameters))
    _check_types("takes", ((state, constants, *args), named), program.in_tree, program.in_avals)
    outside = {name: check.type for name, check in signature.checks.items()}
    given = (_types(signature.result), state, *([outside] if outside else []))
    _check_types("gives", given, program.out_tree, program.out_avals)
    if (order := _derivatives(program)) != signature.vjp_order:
        raise ValueError(f"it holds {order} derivatives, and the manifest says {signature.vjp_order}")
    if program.nr_devices != 1:
        raise ValueError(f"it runs on {program.nr_devices} devices")


def check_lookup_programs(
    manifest: ExportManifest,
    signature: FunctionSignature,
    tables: Sequence[str],
    numbers: jax.export.Exported,
    results: jax.export.Exported,
    asked: jax.export.Exported | None,
) -> None:
    """Raise ValueError unless the inputs and outputs of the programs around lookups are those in the manifest."""
    state = {name: manifest.variables[name].type for name in signature.variables if name not in tables}
    constants = {name: manifest.constants[stored] for name, stored in signature.constants.items()}
    args, named = _types(arguments_of(signature.parameters))
    _check_types("takes", ((state, constants, *args), named), numbers.in_tree, numbers.in_avals)
    found = [array_type_of(jax.ShapeDtypeStruct(one.shape, one.dtype)) for one in numbers.out_avals]
    if len(found) != len(tables) or not all(jax.numpy.issubdtype(one.dtype, jax.numpy.integer) for one in found):
        raise ValueError(f"it gives {', '.join(map(str, found))}, and the manifest has {len(tables)} lookups")
    rows = [_rows_type(manifest.variables[table].type, one.shape) for table, one in zip(tables, found, strict=True)]
    _check_types("takes", ((state, constants, rows, *args), named), results.in_tree, results.in_avals)
    outside = {name: check.type for name, check in signature.checks.items()}
    given = (_types(signature.result), state, *([outside] if outside else []))
    _check_types("gives", given, results.out_tree, results.out_avals)
    if asked is not None:
        assert signature.lookups is not None
        _check_types("takes", ((state, constants, *args), named), asked.in_tree, asked.in_avals)
        pairs = [table in signature.lookups.id_rows for table in tables]
        due = [
            f"u32[{','.join([*map(str, one.shape), '2'])}]" if is_pair else str(one)
            for one, is_pair in zip(found, pairs, strict=True)
        ]
        _check_types("gives", due, asked.out_tree, asked.out_avals)
    if any(one is not None and one.nr_devices != 1 for one in (numbers, results, asked)):
        raise ValueError("it runs on several devices")


def _rows_type(table: str, numbers: Sequence[Any]) -> str:
    """Return the type of rows of a table, of this type, at numbers of this shape."""
    dtype, dims = parts_of_type(table)
    return f"{dtype}[{','.join([*map(str, numbers), *dims[1:]])}]"


def _derivatives(program: jax.export.Exported) -> int:
    return 1 + _derivatives(program.vjp()) if program.has_vjp() else 0


def _types(tree: Tree) -> Any:
    """Return a tree as `jax.export` stores it, with the text of the type as each leaf."""
    return build(plain(tree), iter([type for _, type in program_leaves_of(tree, "")]))


def _check_types(verb: str, expected: Any, tree: Any, avals: Sequence[Any]) -> None:
    types, due = jax.tree_util.tree_flatten(expected)
    if tree != due:
        raise ValueError(f"it {verb} {tree}, and the manifest says {due}")
    for type, aval in zip(types, avals, strict=True):
        dtype, dims = parts_of_type(type)
        if dtype != dtype_name(aval.dtype) or len(dims) != len(aval.shape):
            raise ValueError(f"it {verb} {aval}, and the manifest says {type}")
