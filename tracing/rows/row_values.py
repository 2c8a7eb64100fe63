"""Arrays known by rows: what some rows hold, and a rule for all the others.

`Rowwise` is such an array: `rows` at the positions of an `Index`, and a `Rest`, a formula for all others, which nothing
computes. The rest of a gradient of lookups is zero; the rest of a variable's value is the stored value. An op that
computes each row from the same row of its operands maps `Rowwise` to `Rowwise`: the op runs on the rows, and the rest
is derived symbolically. In the rest, `0 * x` and `0 / x` are 0, so a row without a gradient stays as it is where x is
infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.each_once import representatives
from dflow.tracing.ir.wide_sums import summed_at
from dflow.tracing.jax_frontend import Equation, bind
from dflow.tracing.primitives.state_primitives import gather_p

T = TypeVar("T")


class NotOfRowsError(Exception):
    """Part of a program cannot be computed by rows alone. Its caller runs it unchanged, on dense arrays."""


@dataclass(frozen=True)
class Fill:
    """Every element is one number: a NumPy scalar where it is known, else a traced scalar."""

    value: Any

    @property
    def is_known(self) -> bool:
        """Whether the number is known when the program is traced."""
        return not isinstance(self.value, jax.core.Tracer)


@dataclass(frozen=True, eq=False)
class Stored:
    """A variable's value at the point of the program after `writes`: the number of foreign writes and of own ones."""

    variable: Any
    writes: tuple[int, int]

    def __eq__(self, other: object) -> bool:
        # Not the variables by `==`, which compares values.
        return isinstance(other, Stored) and self.variable is other.variable and self.writes == other.writes

    def __hash__(self) -> int:
        return hash((self.variable, self.writes))


#: The results of rounding at random (`random_rounding`): bfloat16 numbers, and the two parts of those of 24 bits.
NUMBER, HIGH, LOW = "number", "high", "low"
#: Name of the primitive that makes float32 numbers of the two parts.
WIDENED = "widened"


@dataclass(frozen=True, eq=False)
class Whole:
    """A dense array."""

    array: Any


@dataclass(frozen=True, eq=False)
class RowResult:
    """The result of an equation on other rests. An operand without a dimension of rows is a plain array."""

    equation: Equation
    operands: tuple[Any, ...]


Rest: TypeAlias = Fill | Stored | Whole | RowResult


@dataclass(frozen=True, eq=False)
class Index:
    """Positions of rows of an array that has `count` of them.

    `positions`  i32[k]; a unique index has each position once, and `count` in the entries left over
    `is_packed`  whether the entries left over are the last ones
    """

    positions: Any
    count: int
    is_unique: bool = False
    is_packed: bool = False
    #: The rows of rests at these positions, by the identity of the rest and the type of the array that holds it.
    memo: dict[tuple[int, Any, Any], tuple[Rest, Any]] = field(default_factory=dict)

    @cached_property
    def unique(self) -> Index:
        """The positions, each once."""
        if self.is_unique:
            return self
        is_first = self._representatives == jnp.arange(self.positions.size)
        return Index(jnp.where(is_first, self.positions, self.count), self.count, True)

    def summed(self, rows: Any) -> Any:
        """The sums, at the positions of `unique`, of rows at these positions."""
        if self.is_unique:
            return rows
        if rows.dtype == bool:
            return jnp.zeros_like(rows).at[self._representatives].max(rows)
        return summed_at(self._representatives, rows, self.positions.size)

    def is_there(self, ndim: int) -> Any:
        """Whether there is a row at each position, in a shape that broadcasts with rows of `ndim` dimensions."""
        return (self.positions < self.count).reshape((-1,) + (1,) * (ndim - 1))

    @cached_property
    def _representatives(self) -> Any:
        """For each entry of `positions`, the index of an equal entry: the same index for all that are equal."""
        return representatives(self.positions)


class Rowwise:
    """An array whose rows at `index` are `rows`; all other rows come from `rest`. Without an index, all rows do.

    `equation` and `operands` compute the dense form if it is needed.
    """

    def __init__(
        self,
        equation: Equation,
        operands: Sequence[Any],
        rest: Rest,
        index: Index | None = None,
        rows: Any = None,
    ) -> None:
        self.equation, self.operands, self.rest = equation, tuple(operands), rest
        self.index, self.rows = index, rows
        #: The whole array, once something has needed it.
        self.dense: Any = None
        #: The variables whose values the dense form is made of.
        self.variables: frozenset[Any] = frozenset().union(
            [rest.variable] if isinstance(rest, Stored) else [],
            *(operand.variables for operand in self.operands if isinstance(operand, Rowwise)),
        )

    @property
    def aval(self) -> Any:
        """The type of the whole array."""
        return self.equation.outvars[0].aval

    @property
    def is_sparse(self) -> bool:
        """Whether the array is zero outside `index`."""
        return self.index is not None and is_zero(self.rest)

    def at(self, index: Index) -> Any:
        """The rows at `index`, which must be the array's own index if it has one."""
        return rows_of(self.rest, index, self.aval) if self.index is None else self.rows

    @cached_property
    def unique(self) -> Rowwise:
        """The same array with each position once: rows of the same position are summed. The rest must be zero."""
        if self.index is None or self.index.is_unique:
            return self
        return self.moved(self.index.unique, self.index.summed(self.rows))

    def moved(self, index: Index, rows: Any) -> Rowwise:
        """The same array by another index."""
        moved = Rowwise(self.equation, self.operands, self.rest, index, rows)
        moved.dense = self.dense
        return moved


def operands_first(root: T, operands: Callable[[T], list[T] | None]) -> Iterator[T]:
    """Yield `root` and all it depends on, operands before the values that use them, each once.

    `operands` returns None for a value that is done. It does not recurse, since programs are long.
    """
    stack = [root]
    while stack:
        waiting = operands(stack[-1])
        if waiting is None:
            stack.pop()
        elif missing := [each for each in waiting if operands(each) is not None]:
            stack += missing
        else:
            yield stack.pop()


def rows_of(rest: Rest, index: Index, aval: Any) -> Any:
    """The rows at an index of an array of type `aval` that holds `rest`."""

    def missing(wanted: tuple[Rest, Any]) -> list[tuple[Rest, Any]] | None:
        return None if _key(*wanted) in index.memo else _rests_in(wanted[0])

    for each, type in operands_first((rest, aval), missing):
        remember_rows(each, index, type, _rows_of(each, index, type))
    return index.memo[_key(rest, aval)][1]


def remember_rows(rest: Rest, index: Index, aval: Any, rows: Any) -> None:
    """Set the rows at an index of an array of type `aval` that holds `rest`."""
    index.memo[_key(rest, aval)] = rest, rows


def _key(rest: Rest, aval: Any) -> tuple[int, Any, Any]:
    return id(rest), aval.shape, aval.dtype


def _rests_in(rest: Rest) -> list[tuple[Rest, Any]]:
    """The rests that `rest` is computed from, with the types of their arrays."""
    if not isinstance(rest, RowResult):
        return []
    operands = zip(rest.operands, rest.equation.invars, strict=True)
    return [(each, atom.aval) for each, atom in operands if isinstance(each, Rest)]


def _rows_of(rest: Rest, index: Index, aval: Any) -> Any:
    match rest:
        case Fill(value):
            shape = (index.positions.shape[0], *aval.shape[1:]) if aval.shape else ()
            return jnp.broadcast_to(jnp.asarray(value, aval.dtype), shape)
        case Stored(variable, _):
            return gather_p.bind(index.positions, handle=variable.handle, once=False)
        case Whole(array):
            return jnp.asarray(array).at[index.positions].get(mode="clip")
        case RowResult(equation, operands):
            inner = [
                index.memo[_key(operand, atom.aval)][1] if isinstance(operand, Rest) else operand
                for operand, atom in zip(operands, equation.invars, strict=True)
            ]
            return on_rows(equation, inner, index.positions.shape[0])


#: Parameters that hold the shape of a result.
_SHAPES = ("shape", "new_sizes")


def on_rows(equation: Equation, operands: Sequence[Any], size: int) -> Any:
    """The result of an equation on some rows. `operands` have only these rows, `size` of them."""
    params = {key: (size, *value[1:]) if key in _SHAPES and value else value for key, value in equation.params.items()}
    return bind(equation.primitive, params, operands, None)[0]


def made(equation: Equation, rests: Sequence[Any]) -> Rest:
    """The rest of the result of an elementwise equation, simplified."""
    if all(isinstance(rest, Fill) and rest.is_known for rest in rests):
        return Fill(computed_now(equation, [rest.value for rest in rests])[0])
    simple = _SIMPLE.get(equation.primitive.name)
    found = simple(equation, rests) if simple is not None else None
    if found is not None:
        return found
    if not all(isinstance(rest, Fill) for rest in rests):
        return RowResult(equation, tuple(rests))
    values = [jnp.asarray(rest.value, atom.aval.dtype) for rest, atom in zip(rests, equation.invars, strict=True)]
    return Fill(bind(equation.primitive, equation.params, values, None)[0])


def computed_now(equation: Equation, numbers: Sequence[Any]) -> list[Any]:
    """The results, as NumPy scalars, of an elementwise equation on known numbers, computed while tracing."""
    with jax.ensure_compile_time_eval():
        values = [np.asarray(number, atom.aval.dtype) for number, atom in zip(numbers, equation.invars, strict=True)]
        results = bind(equation.primitive, equation.params, values, None)
        return [np.asarray(result)[()] for result in results]


def is_number(rest: Any, number: float) -> bool:
    """Whether every element is known to be `number`."""
    return isinstance(rest, Fill) and rest.is_known and bool(np.asarray(rest.value) == number)


def is_zero(rest: Any) -> bool:
    """Whether every element is known to be zero."""
    return is_number(rest, 0)


def is_same(one: Any, other: Any) -> bool:
    """Whether two rests are known to be equal."""
    if isinstance(one, Fill) and isinstance(other, Fill):
        return one.is_known and other.is_known and bool(np.asarray(one.value) == np.asarray(other.value))
    return one is other or (isinstance(one, Stored) and one == other)


def without_change(equation: Equation, rest: Rest) -> Rest | None:
    """The rest of a rounding at random if it loses nothing: of zeros, or of values that had as few bits; else None."""
    if is_zero(rest):
        return Fill(np.zeros((), equation.params["new_dtype"])[()])
    if equation.params["result"] == NUMBER:
        return _convert(equation, [rest])
    if not isinstance(rest, RowResult) or rest.equation.primitive.name != WIDENED:
        return None
    part: Rest = rest.operands[equation.params["result"] == LOW]
    return part


def _add(equation: Equation, rests: Sequence[Any]) -> Rest | None:
    one, other = rests
    return other if is_zero(one) else one if is_zero(other) else None


def _mul(equation: Equation, rests: Sequence[Any]) -> Rest | None:
    one, other = rests
    if is_zero(one) or is_zero(other):
        return Fill(np.zeros((), equation.outvars[0].aval.dtype)[()])
    return other if is_number(one, 1) else one if is_number(other, 1) else None


def _div(equation: Equation, rests: Sequence[Any]) -> Rest | None:
    return rests[0] if (is_zero(rests[0]) and not is_zero(rests[1])) or is_number(rests[1], 1) else None


def _select(equation: Equation, rests: Sequence[Any]) -> Rest | None:
    which, *cases = rests
    if isinstance(which, Fill) and which.is_known:
        found: Rest = cases[int(which.value)]
        return found
    return cases[0] if all(is_same(cases[0], case) for case in cases[1:]) else None


def _convert(equation: Equation, rests: Sequence[Any]) -> Rest | None:
    """The original rest, if this conversion undoes an earlier one to a wider dtype."""
    (rest,) = rests
    dtype = equation.params["new_dtype"]
    if not isinstance(rest, RowResult) or rest.equation.primitive.name != "convert_element_type":
        return None
    was, between = rest.equation.invars[0].aval.dtype, rest.equation.outvars[0].aval.dtype
    is_wider = jnp.promote_types(was, between) == between and any(
        jnp.issubdtype(was, kind) and jnp.issubdtype(between, kind) for kind in (jnp.floating, jnp.integer)
    )
    return rest.operands[0] if was == dtype and is_wider else None


_SIMPLE: dict[str, Callable[[Equation, Sequence[Any]], Rest | None]] = {
    "add": _add,
    "add_any": _add,
    "sub": lambda equation, rests: rests[0] if is_zero(rests[1]) else None,
    "mul": _mul,
    "div": _div,
    "and": lambda equation, rests: next(filter(is_zero, rests), None),
    "select_n": _select,
    "convert_element_type": _convert,
    "copy": lambda equation, rests: rests[0],
    "copy_p": lambda equation, rests: rests[0],
}
