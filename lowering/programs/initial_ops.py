"""The ops of a variable's initialiser, as JAX dispatches them: recorded once, run here or on the variable's task.

Why: an initialiser compiled as one program may differ in last bits from one that JAX runs op by op, as in a standalone
process. Run op by op it gives the same bits everywhere. Besides, initialisers that differ in numbers only (keys,
scales) share their programs, since numbers are arguments.

Invariant: values that the initialiser closes over are read when the ops are recorded, not when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.programs.program import export_program
from dflow.lowering.values.first_value import joined_rows
from dflow.tracing.ir.exact_attributes import exact_attributes
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.jax_frontend import (
    Equation,
    bind,
    dispatched,
    evaluated,
    has_other_effects,
    is_literal,
    key_implementation,
    touches_state,
)
from dflow.tracing.state.initial_value import TypedInitial, check_needs_nothing, struct_type

#: A value of at most this size is computed by the process that creates the variable, and sent.
SENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """Instructions for another process to compute a value.

    Values are numbered: first the `arrays`, then the results of each call in order. A call is the index of a program
    and the numbers of the values that it takes. `result` is the number of the computed value. With `starts`, this is
    the part of the value that begins at the row that value number 0 says; there is one at each of these rows.
    """

    arrays: Sequence[npt.NDArray[Any]]
    calls: Sequence[tuple[int, tuple[int, ...]]]
    result: int
    starts: Sequence[int] = ()


class Exports:
    """The programs of ops, each exported once."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._numbers: dict[Hashable, tuple[int, Equation]] = {}

    def number(self, equation: Equation) -> int:
        """Return the index in `blobs` of the program of an equation, exporting it if it is new."""
        types = [_type_of(atom) for atom in equation.invars]
        key: Hashable = equation.primitive, exact_attributes(equation.params), *types
        try:
            hash(key)
        except TypeError:  # a parameter without a hash; the equation is kept alive
            key = id(equation)
        if key not in self._numbers:
            self._numbers[key] = len(self.blobs), equation
            self.blobs.append(export_program(_program(equation, types), list(map(_plain_type, types))))
        return self._numbers[key][0]


class InitialOps(TypedInitial):
    """The ops of the initialiser of the variable `name`.

    With `starts` the initialiser gives some rows of the value, those from the row on that it takes, i32[]: it is
    called with each of these rows, so that what it computes beside the value is small.
    Raises VariableError unless it is a function (otherwise without arguments) that returns an array.
    """

    def __init__(self, initial: Callable[..., Any], name: str | None = None, starts: Sequence[int] = ()) -> None:
        self._starts = starts
        if not starts:
            check_needs_nothing(initial, name)
        self._jaxpr, consts, struct = dispatched(initial, *map(np.int32, starts[:1]))
        self.type = struct_type(struct, name)
        if starts:
            rows, *others = self.type.shape
            self.type = replace(self.type, shape=(starts[-1] + rows, *others))
        # The user may write to a NumPy array before the ops run.
        self._consts = [const.copy() if isinstance(const, np.ndarray) else const for const in consts]
        #: Whether the initialiser touches variables, so that its ops can run in this process only.
        self.reads_state = touches_state(self._jaxpr.effects)
        #: Bytes of captured arrays, which are kept until the ops run.
        self.size_bytes = sum(getattr(const, "nbytes", 0) for const in self._consts)

    @property
    def are_sent(self) -> bool:
        """Whether the value is computed on its task by a recipe, since sending it would cost more."""
        if has_other_effects(self._jaxpr.effects) or not self._jaxpr.eqns:
            return False
        return self.type.size_bytes > max(SENT_BYTES, 2 * self.size_bytes)

    def __call__(self) -> Any:
        # The first use of a variable may be in a trace, which must not record these ops.
        with jax.ensure_compile_time_eval():
            if not self._starts:
                return self._evaluated()
            return joined_rows(self.type, self._starts, self._evaluated)

    def _evaluated(self, *args: Any) -> Any:
        return evaluated(
            self._jaxpr, self._consts, args, lambda one, operands: bind(one.primitive, one.params, operands, None)
        )[0]

    def recipe(self, exports: Exports) -> Recipe:
        """Return the ops for another process, and add their programs to `exports`."""
        given: list[tuple[Any, Any]] = [*zip(self._jaxpr.invars, map(np.int32, self._starts[:1]), strict=True)]
        given += zip(self._jaxpr.constvars, self._consts, strict=True)
        arrays = [_plain(value, var) for var, value in given]
        numbers: dict[Any, int] = {var: number for number, (var, _) in enumerate(given)}
        for literal in (atom for equation in self._jaxpr.eqns for atom in equation.invars if is_literal(atom)):
            numbers[id(literal)] = len(arrays)
            arrays.append(_plain(literal.val, literal))
        calls, following = [], len(arrays)
        for equation in self._jaxpr.eqns:
            takes = tuple(numbers[id(atom) if is_literal(atom) else atom] for atom in equation.invars)
            calls.append((exports.number(equation), takes))
            numbers.update(zip(equation.outvars, range(following, following + len(equation.outvars)), strict=True))
            following += len(equation.outvars)
        return Recipe(arrays, calls, numbers[self._jaxpr.outvars[0]], self._starts)


def _type_of(atom: Any) -> ArrayType:
    return ArrayType(atom.aval.dtype, tuple(atom.aval.shape))


def _program(equation: Equation, types: Sequence[ArrayType]) -> Callable[..., list[Any]]:
    """Return a function of the equation on plain arrays: PRNG keys, which cannot be sent, are passed as their data."""

    def program(*operands: Any) -> list[Any]:
        values = [_with_keys(operand, type) for operand, type in zip(operands, types, strict=True)]
        results = bind(equation.primitive, equation.params, values, None)
        return [jax.random.key_data(result) if _is_key(result.dtype) else result for result in results]

    return program


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _with_keys(operand: Any, type: ArrayType) -> Any:
    if not _is_key(type.dtype):
        return operand
    return jax.random.wrap_key_data(operand, impl=key_implementation(type.dtype).name)


def _plain_type(type: ArrayType) -> ArrayType:
    return array_type_of(jax.eval_shape(jax.random.key_data, type.struct)) if _is_key(type.dtype) else type


def _plain(value: Any, atom: Any) -> npt.NDArray[Any]:
    if _is_key(atom.aval.dtype):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value, dtype=atom.aval.dtype)
