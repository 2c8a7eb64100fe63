"""A function of an export as a compiled function over variables: its arguments are checked, and its state updated."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from jax import export

from dflow.calls.function import Function, jit
from dflow.distributed.training.applying import refuse_own_training
from dflow.exporting.export_manifest import (
    FunctionSignature,
    Parameter,
    and_list,
    arguments_of,
    open_sizes_of,
    signature_text,
)
from dflow.exporting.exported_call import compiled, python_signature, result_of
from dflow.exporting.open_sizes import text_as_given
from dflow.exporting.row_lookups import RowLookups, rows_at
from dflow.lowering.programs.portable_tree import MismatchError, build, flatten, parts_of_type, plain, program_leaves_of
from dflow.lowering.values.devices import default_name
from dflow.tracing.errors import ExportError, SignatureError
from dflow.tracing.ir.types import DTYPES, ArrayType, array_type_of, dtype_name
from dflow.tracing.number_range import check_number
from dflow.tracing.primitives.id_checks import after_id_check
from dflow.tracing.state.resources import Variable, is_variable


class LoadedFunction:
    """A function of an export, whose calls are made of its programs.

    program    the whole program
    lookups    the programs around its lookups, which are called instead: then its tables are not read whole
    variables  those of the export by name, and `constants` the large arrays of the export
    unread     types of variables that are elsewhere, by name: no result depends on their values
    """

    def __init__(
        self,
        name: str,
        signature: FunctionSignature,
        program: export.Exported,
        lookups: RowLookups | None,
        variables: Mapping[str, Variable],
        constants: Mapping[str, Any],
        unread: Mapping[str, ArrayType],
    ) -> None:
        self.name, self.signature, self.lookups, self.variables = name, signature, lookups, variables
        self._program, self._unread = program, unread
        self._positional = [parameter for parameter in signature.parameters if parameter.by != "name"]
        self._arguments = plain(arguments_of(signature.parameters))
        self._python = python_signature(signature.parameters)
        self._given = {key: constants[stored] for key, stored in signature.constants.items()}
        self._trained = [variables[key] for key in signature.writes if variables[key].trainable]

    def compiled(self) -> Function[..., Any]:
        """Return the compiled function."""

        def run(*args: Any, **kwargs: Any) -> Any:
            refuse_own_training(run, self.name, self._trained)
            return self._call(self._rows, args, kwargs)

        return compiled(self.name, self.signature, run)

    def numbers(self, *, of_ids: bool = False) -> Function[..., Any]:
        """Return a compiled function of the same arguments: the numbers of the rows that each lookup asks for.

        of_ids  whether of a lookup in a table with a vocabulary it gives the ids, u32[n, 2]
        """
        lookups = self._lookups_here()
        program = lookups.asked if of_ids and lookups.asked is not None else lookups.numbers

        def numbers(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = build(self._arguments, iter(self._leaves(args, kwargs)))
            with self._naming_sizes():
                return program.call(self._state(), self._given, *args, **kwargs)

        return jit(numbers)

    def results(self) -> Function[..., Any]:
        """Return the compiled function with a first argument, the rows that each lookup found."""
        self._lookups_here()

        def results(rows: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
            refuse_own_training(results, self.name, self._trained)
            return self._call(lambda *_: rows, args, kwargs)

        return jit(results)

    def _lookups_here(self) -> RowLookups:
        if self.lookups is None:
            raise ExportError(f"{self.name} has no lookups in tables outside of this process")
        return self.lookups

    def _rows(self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        lookups = self._lookups_here()
        numbers = lookups.numbers.call(state, self._given, *args, **kwargs)
        return [rows_at(self.variables[table], each) for table, each in zip(lookups.tables, numbers, strict=True)]

    def _state(self) -> dict[str, Any]:
        tables = () if self.lookups is None else self.lookups.tables
        unread = {key: jnp.zeros(type.shape, type.dtype) for key, type in self._unread.items()}
        names = (key for key in self.signature.variables if key not in tables)
        return {key: unread[key] if key in unread else self.variables[key].read() for key in names}

    def _call(self, rows: Callable[..., Sequence[Any]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of a call, and update the variables. `rows` gives those of the lookups, if there are."""
        signature = self.signature
        leaves = self._leaves(args, kwargs)
        plain_args, plain_kwargs = build(self._arguments, iter(leaves))
        state = self._state()
        with self._naming_sizes():
            if signature.writes and signature.checks:
                # Before it writes anything: XLA computes no more of this call than the ids that it checks.
                _, _, *outside = self._called(rows, state, plain_args, plain_kwargs)
                if leaves:
                    plain_args, plain_kwargs = self._after_checks(leaves, outside, (plain_args, plain_kwargs))
                else:
                    state = self._after_checks(leaves, outside, state)
            results, after, *outside = self._called(rows, state, plain_args, plain_kwargs)
            if not signature.writes:
                results = self._after_checks(leaves, outside, results)
        for key in signature.writes:
            self.variables[key].assign(after[key])
        return result_of(signature, results, self.variables)

    def _called(
        self, rows: Callable[..., Sequence[Any]], state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.lookups is None:
            return self._program.call(state, self._given, *args, **kwargs)
        return self.lookups.results.call(state, self._given, rows(state, args, kwargs), *args, **kwargs)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arrays of a call's arguments, in the order of the parameters. Raises SignatureError."""
        _check_platform(self.name, self.signature)
        values = _bound(self.name, self.signature, self._python, args, kwargs)
        parameters = self.signature.parameters
        return [leaf for parameter in parameters for leaf in _leaves(self.name, parameter, values[parameter.name])]

    def _after_checks(self, leaves: Sequence[Any], outside: Sequence[Mapping[str, Any]], values: Any) -> Any:
        """Return a pytree of arrays as it is. Raises InputError, when it runs, for an id outside of its table."""
        sizes = open_sizes_of(self.signature.parameters)
        for name, check in self.signature.checks.items():
            size = check.rows
            if isinstance(size, str):
                number, dim = sizes[size]
                size = max(1, leaves[number].shape[dim])  # of no bags: the program says 0 also if all numbers are right
            values = after_id_check(outside[0][name], values, size=size, table=check.table, noun=check.noun)
        return values

    @contextmanager
    def _naming_sizes(self) -> Iterator[None]:
        """Replace JAX's errors about inconsistent sizes by SignatureError, with the parameters' names."""
        try:
            yield
        except ValueError as error:
            if small := re.search(r"Expected value >= 1 for dimension variable '(\w+)'", str(error)):
                raise SignatureError(
                    f"{self.name} was called with the size 0 for {small[1]}, and an op of it needs 1 or more",
                    "skip the call when that dimension is empty",
                ) from None
            found = re.search(r"Found inconsistency between (.*?)(?: Using the following|$)", str(error), re.DOTALL)
            if found is None:
                raise
            found_text = re.sub(
                r"args\[(\d+)\]", lambda index: self._positional[int(index[1]) - 2].name, text_as_given(found[1])
            )
            found_text = re.sub(r"kwargs\['(\w+)'\]", r"\1", found_text)
            raise SignatureError(
                f"{self.name} was called with inconsistent sizes: {found_text.rstrip('. ')}",
                "a letter in a shape is one size throughout",
            ) from None


def _check_platform(name: str, signature: FunctionSignature) -> None:
    platform = default_name().partition(":")[0]
    if platform == "gpu":  # exports distinguish "cuda" and "rocm"
        platform = export.default_export_platform()
    if platform not in signature.platforms:
        raise ExportError(
            f"{name} was exported for {and_list(signature.platforms)}, and this process runs on {platform}",
            f"export it with platforms={(*signature.platforms, platform)!r}",
        )


def _bound(
    name: str, signature: FunctionSignature, python: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the value of each parameter. Raises SignatureError if the arguments do not match."""
    try:
        return python.bind(*args, **kwargs).arguments
    except TypeError as error:
        fixed = ", ".join(word for word in kwargs if word in signature.fixed)
        remedy = f"leave out {fixed}, fixed when it was exported" if fixed else "give it these, and no others"
        raise SignatureError(f"{signature_text(name, signature)} was called otherwise: {error}", remedy) from None


def _leaves(name: str, parameter: Parameter, value: Any) -> Iterator[Any]:
    try:
        leaves = flatten(parameter.tree, value, parameter.name)
    except MismatchError as error:
        raise SignatureError(
            f"{name} was called with another structure: {error}", "give it the structure it was exported for"
        ) from None
    for (path, wanted), leaf in zip(program_leaves_of(parameter.tree, parameter.name), leaves, strict=True):
        yield _fitting(name, path, wanted, leaf)


def _fitting(name: str, path: str, wanted: str, leaf: Any) -> Any:
    """Return the leaf as an array of the expected type. Python numbers take its dtype; others raise SignatureError."""
    check_number(leaf, f"{name}: argument {path!r}")
    array = leaf.read() if is_variable(leaf) else jnp.asarray(leaf)
    dtype, dims = parts_of_type(wanted)
    given = array_type_of(array)
    if given.weak and dtype in DTYPES and jnp.result_type(DTYPES[dtype], array) == DTYPES[dtype]:
        array = array.astype(DTYPES[dtype])
    shape = [str(dim) for dim in array.shape]
    fits = len(shape) == len(dims) and all(
        due == size for due, size in zip(dims, shape, strict=True) if due.isdecimal()
    )
    if dtype_name(array.dtype) != dtype or not fits:
        remedy = "give it the shape it was exported for" if dtype_name(array.dtype) == dtype else "convert it"
        raise SignatureError(
            f"{name} was exported for {path}: {wanted}, and called with {given.strong}",
            f"{remedy}, or export it for that too",
        )
    return array
