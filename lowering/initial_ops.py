"""The ops of a variable's initialiser, as JAX dispatches them: recorded once, run here or on the variable's task.

Why: an initialiser that is compiled as one program gives other last bits than JAX, which runs it op by op, gives in a
process without a cluster. Run op by op it gives the same bits everywhere. And the programs of two initialisers that
differ in numbers only (keys, scales) are the same programs, since numbers are their arguments.

Invariant: what the initialiser closes over is read when the ops are recorded, not when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.program import export_program
from dflow.tracing.initial_value import TypedInitial, check_needs_nothing, struct_type
from dflow.tracing.jax_frontend import (
    Equation,
    bind,
    dispatched,
    has_other_effects,
    is_literal,
    key_implementation,
    touches_state,
)
from dflow.tracing.types import ArrayType, array_type_of

#: A value up to this size is computed by the process that creates the variable, and sent.
SENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """How another process computes a value.

    Values are numbered: first the `arrays`, then the results of each call in order. A call is the number of a program
    and the numbers of the values that it takes. `result` is the number of the value wanted.
    """

    arrays: Sequence[npt.NDArray[Any]]
    calls: Sequence[tuple[int, tuple[int, ...]]]
    result: int


class Exports:
    """The programs of ops, each exported once."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._numbers: dict[Any, tuple[int, Equation]] = {}

    def number(self, equation: Equation) -> int:
        """The place in `blobs` of the program that does what the equation does to its operands."""
        types = [_type_of(atom) for atom in equation.invars]
        # The equation is kept with the number, for some of its parameters are known by their identity.
        key = (equation.primitive, *map(_identity, sorted(equation.params.items())), *types)
        if key not in self._numbers:
            self._numbers[key] = len(self.blobs), equation
            self.blobs.append(export_program(_program(equation, types), list(map(_plain_type, types))))
        return self._numbers[key][0]


class InitialOps(TypedInitial):
    """The ops of one initialiser, which is that of the variable `name`.

    Raises VariableError unless it is a function without arguments that returns an array.
    """

    def __init__(self, initial: Callable[[], Any], name: str | None = None) -> None:
        check_needs_nothing(initial, name)
        self._jaxpr, consts, struct = dispatched(initial)
        self.type = struct_type(struct, name)
        # Its owner may write to a NumPy array before the ops run.
        self._consts = [const.copy() if isinstance(const, np.ndarray) else const for const in consts]
        #: Whether the initialiser reads variables, so that its ops run nowhere but in its own call.
        self.reads_state = touches_state(self._jaxpr.effects)
        #: Bytes kept until the ops run.
        self.size_bytes = sum(getattr(const, "nbytes", 0) for const in self._consts)

    @property
    def are_sent(self) -> bool:
        """Whether the value is computed on its task by a recipe, because to send it would cost more."""
        if has_other_effects(self._jaxpr.effects) or not self._jaxpr.eqns:
            return False
        return self.type.size_bytes > max(SENT_BYTES, 2 * self.size_bytes)

    def __call__(self) -> Any:
        # A variable may be used first in a trace, which these ops are no part of.
        with jax.ensure_compile_time_eval():
            env: dict[Any, Any] = dict(zip(self._jaxpr.constvars, self._consts, strict=True))
            for equation in self._jaxpr.eqns:
                values = [_value(atom, env) for atom in equation.invars]
                results = bind(equation.primitive, equation.params, values, None)
                env.update(zip(equation.outvars, results, strict=True))
            return _value(self._jaxpr.outvars[0], env)

    def recipe(self, exports: Exports) -> Recipe:
        """The ops for another process; their programs are in `exports`."""
        arrays = [_plain(const, var) for var, const in zip(self._jaxpr.constvars, self._consts, strict=True)]
        numbers: dict[Any, int] = {var: number for number, var in enumerate(self._jaxpr.constvars)}
        for literal in self._literals():
            numbers[id(literal)] = len(arrays)
            arrays.append(_plain(literal.val, literal))
        calls, following = [], len(arrays)
        for equation in self._jaxpr.eqns:
            takes = tuple(numbers[id(atom) if is_literal(atom) else atom] for atom in equation.invars)
            calls.append((exports.number(equation), takes))
            numbers.update(zip(equation.outvars, range(following, following + len(equation.outvars)), strict=True))
            following += len(equation.outvars)
        return Recipe(arrays, calls, numbers[self._jaxpr.outvars[0]])

    def _literals(self) -> list[Any]:
        return [atom for equation in self._jaxpr.eqns for atom in equation.invars if is_literal(atom)]


def _value(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if is_literal(atom) else env[atom]


def _type_of(atom: Any) -> ArrayType:
    return ArrayType(atom.aval.dtype, tuple(atom.aval.shape))


def _identity(parameter: tuple[str, Any]) -> Any:
    try:
        hash(parameter)
    except TypeError:
        return parameter[0], id(parameter[1])
    return parameter


def _program(equation: Equation, types: Sequence[ArrayType]) -> Callable[..., list[Any]]:
    """What the equation does, on plain arrays: PRNG keys, which do not travel, are their data."""

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
