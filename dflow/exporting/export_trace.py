"""Trace a function for export: from argument types to a signature and its program."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from dflow.calls.function import jit
from dflow.calls.static_arguments import StaticArguments, static_arguments
from dflow.exporting.export_manifest import (
    CheckEntry,
    FunctionSignature,
    LookupsEntry,
    Parameter,
    ProgramEntry,
    arguments_of,
    open_sizes_of,
)
from dflow.exporting.open_sizes import as_given, open_letters, sizes_from_zero
from dflow.lowering.programs.export import PureProgram, exported, pure_program
from dflow.lowering.programs.lookup_programs import LookupPrograms, lookup_programs
from dflow.lowering.programs.portable_tree import Tree, UnknownNodeError, is_bound, tree_of
from dflow.tracing.argument_ids import GivenIds, is_list_of_strings, naming_ids, with_ids
from dflow.tracing.derivatives.discharge import constants_within
from dflow.tracing.errors import DflowError, ExportError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.jax_frontend import closed_parts, devices_of_shardings
from dflow.tracing.jaxprs.captured import is_large
from dflow.tracing.jaxprs.trace import argument_names
from dflow.tracing.source import is_user_file
from dflow.tracing.state.resources import Variable, is_variable
from dflow.tracing.state.variable_trees import handles

_VARIADIC = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class TracedExport:
    """A traced function: its signature, pure form and program, and its programs as bytes by the end of their names."""

    signature: FunctionSignature
    pure: PureProgram
    program: jax.export.Exported
    contents: Mapping[str, bytes]
    #: The variables that the function uses or returns, by name.
    variables: Mapping[str, Variable]


#: `make` with the options of an export.
Trace = Callable[..., TracedExport]


def make(
    name: str,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Mapping[str, Any] | None = None,
    **options: Any,
) -> TracedExport:
    """Trace `fn` for these types of arguments, and lower it to a program. Raises ExportError.

    names    of large arrays that the function closes over; by default those in its code
    options  platforms, vjp_order and disabled_checks, as for `dflow.export`

    A letter is any size from 0, or from 1 if an op of the function needs that.
    """
    args, kwargs, ids = _with_ids(name, fn, args, kwargs)
    letters = open_letters((args, kwargs))

    def attempt(free: Sequence[str]) -> TracedExport | None:
        """Return the program whose letters in `free` may be 0; None if an op needs a row, or for another fault."""
        own, named = sizes_from_zero((args, kwargs), free)
        try:
            return _made(name, fn, own, named, names, **options)
        except Warning:  # an error by the program's filter: the next trace may not warn again
            raise
        except Exception:
            return None

    with naming_ids(ids):
        if letters and (made := attempt(letters)) is not None:
            return made
        found = _made(name, fn, args, kwargs, names, **options)  # raises the cause of another fault
        free: list[str] = []
        for letter in letters if len(letters) > 1 else ():
            if len(free) < len(letters) - 1 and (made := attempt([*free, letter])) is not None:
                found, free = made, [*free, letter]
        return found


def _with_ids(
    name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Sequence[GivenIds]]:
    """Return the arguments with ids in place of strings and 64-bit integers, and these ids."""
    static = static_arguments(fn) if callable(fn) and hasattr(fn, "trace") else StaticArguments()
    *traced, fixed = static.split(args, kwargs)

    def names() -> list[str]:
        found = argument_names(fn, args, kwargs, static.test_of(args), is_list_of_strings)
        return [f"{name}: argument {one!r}" for one in found]

    given, ids = with_ids(tuple(traced), names, is_declared=True)
    if ids is None:
        return args, kwargs, ()
    made_args, made_kwargs = static.joined(args, kwargs)(*given) if fixed else given
    return made_args, made_kwargs, ids


def _made(
    name: str,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Mapping[str, Any] | None = None,
    *,
    platforms: tuple[str, ...],
    vjp_order: int,
    disabled_checks: tuple[jax.export.DisabledSafetyCheck, ...],
) -> TracedExport:
    if not callable(fn):
        raise ExportError(
            f"{name} is a {type(fn).__name__}, which is no function",
            "write dflow.export(fn, *specs), or dflow.export({'name': (fn, *specs)}) for several",
        )
    jitted: Any = fn if hasattr(fn, "trace") else jit(fn)
    with _naming_open_sizes(name, (args, kwargs)):
        stage = jitted.trace(*args, **kwargs)
    looked = getattr(stage, "_looked", stage)
    if (count := devices_of_shardings(looked)) > 1:
        raise ExportError(
            f"{name} has shardings over {count} devices, and an export is for one",
            "export it without in_shardings and out_shardings",
        )
    jaxpr, consts = closed_parts(looked.jaxpr)
    parameters, fixed = _parameters(name, jitted, args, kwargs, looked)
    result = _tree(name, looked.out_tree, [var.aval for var in jaxpr.outvars], "result")
    types = [_type_of(var.aval) for var in jaxpr.invars]
    constants = _constants(_names_seen_by(fn) if names is None else names, constants_within(jaxpr, consts))
    pure = pure_program(name, jaxpr, consts, constants, arguments_of(parameters), types, result)
    with _naming_open_sizes(name, (args, kwargs)):
        program, content = exported(pure, platforms, disabled_checks, vjp_order)
        lookups = lookup_programs(pure, platforms, disabled_checks)
    results = jax.tree_util.tree_unflatten(looked.out_tree, [None] * looked.out_tree.num_leaves)
    returned = filter(is_variable, jax.tree_util.tree_leaves(results, is_leaf=is_variable))
    signature = FunctionSignature(
        parameters=parameters,
        result=result,
        fixed=fixed,
        variables=[variable.name for variable in pure.variables],
        writes=[variable.name for variable in pure.written],
        constants={},
        platforms=list(platforms),
        vjp_order=vjp_order,
        calling_convention_version=program.calling_convention_version,
        **msgspec.structs.asdict(_entry(content)),
        checks={
            check.name: CheckEntry(
                check.table, _size(name, check, parameters), str(ArrayType(check.dtype, ())), check.noun
            )
            for check in pure.checks
        },
        lookups=_lookups(lookups),
    )
    contents = {"": content}
    if lookups is not None:
        contents |= {".numbers": lookups.numbers, ".results": lookups.results}
        contents |= {} if lookups.asked is None else {".asked": lookups.asked}
    return TracedExport(signature, pure, program, contents, {v.name: v for v in (*pure.variables, *returned)})


def _entry(content: bytes) -> ProgramEntry:
    return ProgramEntry(len(content), hashlib.sha256(content).hexdigest())


def _lookups(programs: LookupPrograms | None) -> LookupsEntry | None:
    if programs is None:
        return None
    asked = None if programs.asked is None else _entry(programs.asked)
    id_rows = {table.name: how for table in programs.tables if (how := table.hooks.id_rows) is not None}
    names = [table.name for table in programs.tables]
    return LookupsEntry(names, _entry(programs.numbers), _entry(programs.results), asked, id_rows)


def _size(name: str, check: Any, parameters: Sequence[Parameter]) -> int | str:
    """Return the number of rows or bags that a check of ids compares with: a size of an argument, if it is open.

    Raises ExportError for another open number.
    """
    if isinstance(check.size, int):
        return check.size
    size = str(as_given(check.size))
    if size not in open_sizes_of(parameters):
        raise ExportError(
            f"{name}: expected a number of {check.noun} of {check.table} that is fixed, or a size of an argument, got "
            f"{size}",
            "give an argument of that size, or export it for one size of its arguments, and pad the last batch",
        )
    return size


@contextmanager
def _naming_open_sizes(name: str, arguments: Any) -> Iterator[None]:
    """Turn the error of an op that needs a size which is open, of many classes in JAX, into an ExportError."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree_util.tree_leaves(arguments)]
    letters = dict.fromkeys(str(size) for shape in shapes for size in shape if not isinstance(size, int))
    try:
        yield
    except (DflowError, Warning):
        raise
    except Exception as error:
        if not letters:
            raise
        raise ExportError(
            f"{name}: expected ops that take any size of {', '.join(letters)}, got one that needs the number: "
            f"{str(error).splitlines()[0]}",
            "export it for one size of its arguments, and pad the last batch",
        ) from error


def _type_of(array: Any) -> ArrayType:
    return array_type_of(jax.ShapeDtypeStruct(array.shape, array.dtype))


def _text_of(array: Any) -> str:
    return str(_type_of(jax.ShapeDtypeStruct(tuple(map(as_given, array.shape)), array.dtype)))


def _tree(name: str, treedef: Any, leaves: Sequence[Any], path: str) -> Tree:
    try:
        return tree_of(treedef, map(_text_of, leaves), path)
    except UnknownNodeError as error:
        raise ExportError(
            f"{name} cannot be exported: {error.path} is a {error.kind.__name__}, which needs the code to load",
            "export a function that takes and gives dicts (whose keys are strings or integers), "
            "lists, tuples, named tuples and None",
        ) from None


def _parameters(
    name: str, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], looked: Any
) -> tuple[list[Parameter], dict[str, str]]:
    """Return the exported function's parameters in order, and the fixed ones with the text of their value."""
    static = static_arguments(jitted).test_of(args)
    infos = iter(jax.tree_util.tree_leaves(handles(looked.args_info)))
    parameters: list[Parameter] = []
    fixed: dict[str, str] = {}
    for parameter, by, key, value in _given(jitted, args, kwargs):
        treedef: Any = jax.tree_util.tree_structure(value if static(key) else handles(value))
        if static(key) or is_bound(treedef):
            fixed[parameter] = _shown(value)
            continue
        own = [next(infos) for _ in range(treedef.num_leaves)]
        donated = bool(own) and all(info.donated for info in own)
        parameters.append(Parameter(parameter, by, _tree(name, treedef, own, parameter), donated))
    return parameters, fixed


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_By = Literal["position", "either", "name"]


def _given(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, _By, int | str, Any]]:
    """Return each argument as (name, how calls pass it, position or keyword as in `static_argnums`, value)."""
    try:
        parameters = list(inspect.signature(jitted).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_position = {index for index, p in enumerate(parameters[: len(args)]) if p.kind in _VARIADIC}
    # Positional-only, too: every parameter before one without a name.
    unnamed = max(by_position, default=-1) if len(args) <= len(parameters) else len(args) - 1
    found: list[tuple[str, _By, int | str, Any]] = []
    for index, value in enumerate(args):
        has_name = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
        name = parameters[index].name if has_name else f"arg_{index}"
        found.append((name, "position" if index <= unnamed else "either", index, value))
    return found + [(name, "name", name, kwargs[name]) for name in sorted(kwargs)]


def _constants(seen: Mapping[str, Any], consts: Sequence[Any]) -> dict[str, Any]:
    """Return the large arrays among the constants, under their names in `seen` if they have any."""
    named: dict[str, Any] = {}
    for index, const in enumerate(const for const in consts if is_large(const)):
        name = next((name for name, value in seen.items() if _is_same(value, const)), f"constant_{index}")
        named[name if name not in named else f"constant_{index}"] = const
    return named


def _names_seen_by(fn: Any) -> dict[str, Any]:
    """Return the arrays named in the code of a function and of the user's functions that it refers to, by name."""
    arrays: dict[str, Any] = {}
    functions, looked_at = [fn], set()
    while functions:
        function = inspect.unwrap(functions.pop(0))
        function = getattr(function, "__func__", getattr(function, "func", function))
        code = getattr(function, "__code__", None)
        if code is None or code in looked_at or not is_user_file(code.co_filename):
            continue
        looked_at.add(code)
        for name, value in _named_in(function, code).items():
            if isinstance(value, jax.Array | np.ndarray):
                arrays.setdefault(name, value)
            elif callable(value):
                functions.append(value)
    return arrays


def _named_in(function: Any, code: CodeType) -> dict[str, Any]:
    named = {name: function.__globals__.get(name) for name in _globals_of(code)}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that is not bound yet
            named[name] = cell.cell_contents
    return named


def _globals_of(code: CodeType) -> list[str]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [*code.co_names, *(name for part in inner for name in _globals_of(part))]


def _is_same(value: Any, const: Any) -> bool:
    return value is const or (isinstance(value, np.ndarray) and np.shares_memory(value, np.asarray(const)))
