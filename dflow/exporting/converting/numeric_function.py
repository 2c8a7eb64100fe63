"""A function of an export as a function of arrays alone: its names and types, its program and its weights.

It is what the formats of other libraries can hold: no state that changes, no pytrees, no texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.exporting.export_manifest import and_list, arguments_of
from dflow.exporting.exported_call import result_leaves
from dflow.exporting.loader import Loaded
from dflow.lowering.programs.portable_tree import build, is_ids, leaves_of, parts_of_type, plain, program_leaves_of
from dflow.tracing.errors import ExportError
from dflow.tracing.ir.types import parse_dtype
from dflow.tracing.source import is_user_file

#: A file and a line, as MLIR's locations and its errors have them.
_PLACE = re.compile(r'([^\s"]+\.py)"?:(\d+)')
#: What runtimes say about an op that they do not have.
_UNKNOWN = re.compile(r"No FFI handler registered for|Could not find an implementation|unregistered operation")
#: Random integers are below this number.
_IDS = 100


@dataclass(frozen=True)
class NamedType:
    """An argument or a result: its path in the function, such as `batch['x']`, a name made of it, dtype and shape.

    An open size is a text, such as `b`.
    """

    path: str
    name: str
    dtype: Any
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.name}[{','.join(map(str, self.shape))}]"

    def fixed(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with these sizes in place of open ones."""
        return tuple(dim if isinstance(dim, int) else _size(dim, sizes) for dim in self.shape)


@dataclass(frozen=True)
class NumericFunction:
    """A function of `inputs` that gives `outputs`, in order.

    program  the program of the export; `before` are its arrays before the inputs: variables, and large constants
    notes    what the function of the export does that this one does not
    """

    name: str
    program: jax.export.Exported
    before: Sequence[Any]
    inputs: Sequence[NamedType]
    outputs: Sequence[NamedType]
    notes: Sequence[str]
    _signature: Any
    _state: tuple[Any, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}"

    @property
    def letters(self) -> list[str]:
        """The open sizes of the inputs."""
        return [*dict.fromkeys(dim for one in self.inputs for dim in one.shape if isinstance(dim, str))]

    def results(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays that dflow computes for these inputs."""
        args, kwargs = build(plain(arguments_of(self._signature.parameters)), iter(arrays))
        results, *_ = jax.jit(self.program.call)(*self._state, *args, **kwargs)
        return [np.asarray(one) for one in result_leaves(self._signature, results)]

    def drawn(self, random: np.random.Generator, sizes: Mapping[str, int]) -> list[Any]:
        """Return random inputs: normally distributed numbers, and integers from 0 to 99."""
        return [_drawn(random, one.dtype, one.fixed(sizes)) for one in self.inputs]


def numeric_function(model: Loaded, function: str | None, what: str) -> NumericFunction:
    """Return a function of an export, with the present values of its variables, for a format that is called `what`.

    Raises ExportError for a function that writes variables, or was not exported for the CPU.
    """
    name, signature = model._without_state(function, what, "convert")
    state = {key: model.variables[key].read() for key in signature.variables}
    constants = {key: model._constants[stored] for key, stored in signature.constants.items()}
    positional = [one for one in signature.parameters if one.by != "name"]
    ordered = [*positional, *(one for one in signature.parameters if one.by == "name")]
    taken: set[str] = set()
    inputs = [
        _named(path + part, type, taken)
        for one in ordered
        for path, given in leaves_of(one.tree, one.name)
        for part, type in _parts(given)
    ]
    outputs = [_named(path, type, taken) for path, type in program_leaves_of(signature.result, "result")]
    notes = [
        f"{path}: {type} is two arrays here, {path}.high and {path}.low: {_parts(type)[0][1]}, the halves of "
        f"dflow.wide_ids({path})"
        for one in ordered
        for path, type in leaves_of(one.tree, one.name)
        if is_ids(type)
    ]
    if signature.checks:
        tables = and_list(dict.fromkeys(check.table for check in signature.checks.values()))
        notes.append(f"an id outside of {tables} gives NaN here, not an error")
    before = jax.tree_util.tree_leaves((state, constants))
    return NumericFunction(name, model._programs[name], before, inputs, outputs, notes, signature, (state, constants))


def refused(what: str, function: NumericFunction, error: Exception) -> ExportError:
    """Return the error for a function that a library fails on, with the op and the user's line that it names."""
    lines = str(error).splitlines() or [type(error).__name__]
    first = next((line for line in lines if "error:" in line), next(filter(str.strip, lines), ""))
    more = next((line for line in lines if _UNKNOWN.search(line)), "")
    places = (place for place in _PLACE.findall(str(error)) if is_user_file(place[0]))
    where = next((f"\n  at {file}:{line}" for file, line in places), "")
    said = (more or first).rpartition("error: ")[2][:300]
    return ExportError(
        f"{what} {function.name}: {said}{where}", "compute it otherwise, or in the program that calls the model"
    )


def _parts(type: str) -> list[tuple[str, str]]:
    """Return the arrays that an argument of a type is in the program, each with the end of its path."""
    if not is_ids(type):
        return [("", type)]
    half = f"u32[{type.partition('[')[2]}"
    return [(".high", half), (".low", half)]


def _named(path: str, type: str, taken: set[str]) -> NamedType:
    name = re.sub(r"\W+", "_", path).strip("_")
    while name in taken:
        name += "_"
    taken.add(name)
    dtype, dims = parts_of_type(type)
    return NamedType(path, name, np.dtype(parse_dtype(dtype)), tuple(int(d) if d.isdecimal() else d for d in dims))


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    try:
        return sizes[dim]
    except KeyError:
        raise ExportError(
            f"size {dim}: expected a number for this format, got none", f"give it: --sizes {dim}=1"
        ) from None


def _drawn(random: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(random.standard_normal(shape)).astype(dtype)
    most: Any = 1 if dtype == np.bool_ else jnp.iinfo(dtype).max  # type: ignore[no-untyped-call]
    return np.asarray(random.integers(min(_IDS, int(most) + 1), size=shape)).astype(dtype)
