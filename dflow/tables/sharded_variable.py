"""A variable in shards, each an ordinary variable, on several tasks.

Why: an array may be larger than the memory of one task. Lookups, updates and reductions run where the shards are, and
only row numbers, rows and partial results travel; only `read` and `assign` handle the whole array.

A sharded variable is a pytree of its shards. So gradients with respect to it, optimizers of it and `jax.tree` functions
over it work on the shards, and their results have arrays where the variables were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from dflow.scopes import colocate_with
from dflow.tables.changed_rows import changed_rows, track_changed_rows
from dflow.tables.initial_part import initial_part
from dflow.tables.routing import combined, route, rows_of_each_shard
from dflow.tables.shard_layout import ShardLayout, chosen_layout
from dflow.tracing.element_arrays import plain_array
from dflow.tracing.errors import VariableError, VariableShapeError
from dflow.tracing.ir.row_marks import LIFE, PERIOD
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.ir.updates import indices_refusal
from dflow.tracing.ir.wide_sums import is_narrow, sum_dtype
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.number_range import check_number
from dflow.tracing.own_scopes import own_scope
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.id_checks import IDS, check_ids, checked_ids
from dflow.tracing.primitives.state_primitives import gather_p
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.source import as_code, at, caller
from dflow.tracing.state.context import current_home, spread_here
from dflow.tracing.state.initial_value import initial_type
from dflow.tracing.state.resources import LEAST_MEMORY, Variable, is_variable, name
from dflow.tracing.state.row_updates import RowUpdates

#: Most rows of a sharded variable: row numbers are i32.
MOST_ROWS = 2**31 - 1


class ShardedVariable(RowUpdates):
    """An array of one or more dimensions, divided over variables that live on several tasks.

    `initial`  the initial value, or a function without arguments that returns it. Each task computes its part of the
               function's result, with the same bits as the whole, and without the whole if the function's ops work
               element by element (constants, `jax.random` with Threefry keys, arithmetic); other ops run whole
    `shards`   number of shards; by default that of the tasks that new variables are spread over, in one process 1
    `by`       `rows` (neighbouring rows), `modulo` (row r in shard r % shards) or `columns`
    `max_shard_bytes`  in place of `shards`: as many as keep each at this size or below; with `traffic` beside `shards`
    `traffic`  [rows]: how often each row was looked up. The shards have neighbouring rows, so many that the most used
               shard is used as little as can be
    `near`     another sharded variable with as many rows: this one is divided alike, each shard beside the other's
    `track_changes`  whether `changed_rows` can be asked. It costs 4 bytes a row, beside the shards, and their update in
               each update of rows. Not for a division by columns; all processes must give the same
    `together`  number of neighbouring rows that stay in one shard: a divisor of their number. Without `traffic`
    `max_memory`  largest number of bytes in memory of all shards and of the variables near them, such as the slots of
               an optimizer, as for `dflow.Variable`; each shard has a part by its size
    `name`, `dtype`, `trainable`  as for `dflow.Variable`; shard n is the variable `name/n`
    raises     VariableError as `dflow.Variable` does, and for a division that the array does not have
    """

    @suggests_keywords
    def __init__(
        self,
        initial: Any,
        *,
        shards: int | None = None,
        by: str = "rows",
        max_shard_bytes: int | None = None,
        traffic: Any = None,
        near: ShardedVariable | None = None,
        track_changes: bool = False,
        together: int = 1,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
        max_memory: int | None = None,
    ) -> None:
        what = f"the initial value of sharded variable {name or 'unnamed'!r}"
        initial = plain_array(initial, what)
        check_number(initial, what)
        type = initial_type(initial, name)
        home = current_home() if near is None else near.shards[0].home
        held = type if dtype is None else replace(type, dtype=np.dtype(dtype))
        other = None if near is None else near.layout
        self.layout: ShardLayout = chosen_layout(
            held, home.spread, shards, by, max_shard_bytes, traffic, other, together
        )
        if track_changes and self.layout.axis != 0:
            raise VariableError(
                f"track_changes: expected a division by rows or modulo, got by {self.layout.by}",
                "divide it by rows, or leave track_changes out",
            )
        if track_changes and spread_here() is not None and jax.process_count() > 1:
            raise VariableError(
                "track_changes: expected a table on parameter tasks or in one process, got a copy or a part in each "
                "worker",
                "make it within cluster.parameter_servers(), and train it by Async, Sync or Hybrid; or leave "
                "track_changes out",
            )
        beside = near.shards if near is not None else (None,) * self.layout.shards
        most = MOST_ROWS - len((PERIOD, LIFE)) * track_changes
        if type.shape[0] > most:
            raise VariableError(
                f"rows of a sharded variable: expected at most {most}, got {type.shape[0]}",
                "divide it into several tables",
            )
        parts = [self.layout.part(shard) for shard in range(self.layout.shards)]
        shares = _shares(name or "unnamed", max_memory, parts, type)
        row_bytes = type.size_bytes // max(1, type.shape[0])

        def make(part: AxisSlice, name: str | None) -> Any:
            return initial_part(initial, part, row_bytes, name) if callable(initial) else part.of(jnp.asarray(initial))

        named = [None if name is None else f"{name}/{shard}" for shard in range(self.layout.shards)]
        with home.together():
            #: The variables, in order; in a gradient or the result of a `jax.tree` function, arrays.
            self.shards: tuple[Any, ...] = tuple(
                Variable(
                    make(part, one),
                    name=one,
                    dtype=dtype,
                    near=other,
                    trainable=trainable,
                    max_memory=share,
                )
                for part, one, other, share in zip(parts, named, beside, shares, strict=True)
            )
            for shard in self.shards if track_changes else ():
                track_changed_rows(shard)
        for shard, part in zip(self.shards, parts, strict=True):
            shard.part = ArrayPart(type.shape, part)
        self.name = self.shards[0].name.removesuffix("/0") if name is not None else f"sharded_{self.shards[0].name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.layout.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.shards[0].dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self.shape)

    @property
    def trainable(self) -> bool:
        """Whether `dflow.trainable_variables` includes it."""
        return bool(self.shards[0].trainable)

    def read(self) -> jax.Array:
        """The whole array, assembled here from the shards."""
        return self.layout.joined([_read(shard) for shard in self.shards])

    def assign(self, value: Any) -> None:
        """Replace the whole array. Raises VariableShapeError when shape or dtype is not the variable's."""
        check_number(value, f"assign of sharded variable {self.name!r}")
        array = jnp.asarray(value)
        if array.shape != self.shape:
            raise VariableShapeError(
                f"sharded variable {self.name!r}: expected an array of {self.shape}, got one of {array.shape}",
                "give it the whole array; rows are written by scatter_update",
            )
        for number, shard in enumerate(self._variables("assign")):
            shard.assign(self.layout.part(number).of(array))

    def gather(self, indices: Any) -> jax.Array:
        """The rows at `indices`, integers of any shape: an array of shape `indices.shape + shape[1:]`.

        Each row is looked up once, where it is; equal indices share it. Indices have JAX's meaning, as in
        `Variable.gather`: a negative index counts from the end; one past either end gives the row at that end and no
        gradient. Raises VariableShapeError for indices that are no integers.
        """
        given = self._indices("gather", indices)
        with own_scope("gather", self.name):
            wrapped = jnp.where(given < 0, given + self.shape[0], given)
            inside = jnp.clip(wrapped, 0, self.shape[0] - 1)
            rows = self.rows(inside)
            is_there = (wrapped == inside).reshape(*inside.shape, *[1] * (self.ndim - 1))
            return jnp.where(is_there, rows, jax.lax.stop_gradient(rows))

    def rows(self, numbers: Any) -> jax.Array:
        """The rows of these numbers, i32 of any shape; for a number that no row has, any values."""
        shards = self._variables("gather")
        flat = numbers.reshape(-1)
        shape = (*numbers.shape, *self.shape[1:])
        if not math.prod(shape):
            return jnp.zeros(shape, self.dtype)
        if len(shards) == 1 and not shards[0].home.shares_names:
            return shards[0].gather(numbers)
        if not isinstance(flat.shape[0], int):  # a symbolic size, as in an export: a route has no room for any number
            asked = rows_of_each_shard(self.layout, flat)
            looked = [
                gather_p.bind(each, handle=shard.handle, once=False)
                for shard, (each, _) in zip(shards, asked, strict=True)
            ]
            if self.layout.axis == 1:
                return jnp.concatenate(looked, axis=1).reshape(shape)
            owned = [is_own.reshape(-1, *[1] * (self.ndim - 1)) for _, is_own in asked]
            return jnp.select(owned, looked).reshape(shape)
        with own_scope("route", self.name):
            way = route(self.layout, flat)
        way = way._replace(rows=[name(rows, f"{self.name}/{shard}/ids") for shard, rows in enumerate(way.rows)])
        if self.layout.axis == 0:
            found = jnp.concatenate(list(map(_looked_up, shards, way.rows, way.counts)))
        else:
            found = jnp.concatenate([_looked_up(shard, way.rows[0], way.counts[0]) for shard in shards], axis=1)
        return jnp.take(found, way.positions, axis=0, mode="clip").reshape(shape)

    def checked(self, numbers: Any) -> jax.Array:
        """The numbers as i32, if each is that of a row.

        Raises InputError for another, which it names, while the step runs; VariableShapeError if they are no integers.
        """
        array = checked_numbers(self._integers("lookup", numbers), self.shape[0], self.name)
        return self._indices("lookup", array)

    def changed_rows(self, consumer: str) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield the rows that have changed since the consumer's last complete loop over them: numbers and rows.

        consumer  a name of letters, digits, `_`, `.` and `-`, one for each copy that is kept up to date
        yields    pieces of at most 64 MiB: i32[k], each number once, and the rows as they are now, [k, ...]
        raises    VariableError for a table without `track_changes`, for another consumer, and inside traced code

        A consumer's first loop yields all rows, and so does the first one after a restore or a return to a snapshot.
        The rows count as used when the loop ends: a consumer that leaves it, or dies, gets them again.
        """
        return changed_rows(self.name, self.layout, self._variables("changed_rows"), consumer)

    def sum(self, axis: int | None = None) -> jax.Array:
        """The sum, along `axis` or of all elements; only sums of shards travel."""
        total = self._summed(axis, self.dtype)
        return total.astype(self.dtype) if is_narrow(self.dtype) else total

    def mean(self, axis: int | None = None) -> jax.Array:
        """The mean, along `axis` or of all elements; only sums of shards travel."""
        dtype = jnp.result_type(self.dtype, float)  # the sum of integers may be beyond theirs
        total = self._summed(axis, dtype)
        size = self.shape[axis] if axis is not None else math.prod(self.shape)
        return (total / size).astype(dtype)

    def _summed(self, axis: int | None, dtype: Any) -> jax.Array:
        """The sum of the elements as `dtype`, of at least 32 bits."""
        wide = sum_dtype(dtype)
        return self._reduced(lambda shard, axis: jnp.sum(shard.astype(wide), axis=axis), jnp.add, axis)

    def max(self, axis: int | None = None) -> jax.Array:
        """The largest element, along `axis` or of all; only those of shards travel."""
        return self._reduced(jnp.max, jnp.maximum, axis)

    def min(self, axis: int | None = None) -> jax.Array:
        """The smallest element, along `axis` or of all; only those of shards travel."""
        return self._reduced(jnp.min, jnp.minimum, axis)

    def __matmul__(self, other: Any) -> jax.Array:
        """`self @ other`, computed where the shards are."""
        other = _read(other)
        if self.ndim != 2 or jnp.ndim(other) not in (1, 2):
            raise self._no_product(f"{self.shape} @ {jnp.shape(other)}")
        if self.layout.axis == 0:
            return self.layout.joined(self._on_shards("@", lambda shard, _: shard @ other), 0)
        return _sum_of_products(
            self._on_shards("@", lambda shard, part: _product(shard, part._replace(axis=0).of(other))),
            jnp.result_type(self.dtype, other),
        )

    def __rmatmul__(self, other: Any) -> jax.Array:
        """`other @ self`, computed where the shards are."""
        other = jnp.asarray(_read(other))
        if self.ndim != 2 or not other.ndim:
            raise self._no_product(f"{other.shape} @ {self.shape}")
        if self.layout.axis == 1:
            return self.layout.joined(self._on_shards("@", lambda shard, _: other @ shard), other.ndim - 1)
        cut = other.ndim - 1
        return _sum_of_products(
            self._on_shards("@", lambda shard, part: _product(part._replace(axis=cut).of(other), shard)),
            jnp.result_type(self.dtype, other),
        )

    def __getitem__(self, index: Any) -> jax.Array:
        if isinstance(index, slice):
            index = jnp.arange(self.shape[0])[index]
        if isinstance(index, tuple) or index is None or index is Ellipsis:
            raise VariableShapeError(
                f"sharded variable {self.name!r}: expected integers or a slice of rows as index, got {index!r}",
                f"take the rows first, or the whole: {as_code(self.name)}.read()[...]",
            )
        return self.gather(index)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return (self[row] for row in range(len(self)))

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise VariableError(
            f"sharded variable {self.name!r}: expected a method of it, got a conversion to one array",
            f"read it whole: {as_code(self.name)}.read()",
        )

    def __repr__(self) -> str:
        kind = type(self).__name__
        if not all(map(is_variable, self.shards)):
            return f"<{kind} of {', '.join(map(repr, self.shards))}>"
        array = ArrayType(self.dtype, self.shape)
        return f"<{kind} {self.name!r}: {array} in {len(self.shards)} shards by {self.layout.by}>"

    def _variables(self, method: str) -> Sequence[Variable]:
        if not all(map(is_variable, self.shards)):
            raise VariableError(
                f"{method}: expected a sharded variable, got one with {type(self.shards[0]).__name__} instead of "
                f"variables",
                "use the variable itself; of a gradient, each entry of .shards is that of one shard",
            )
        return self.shards

    def _indices(self, method: str, indices: Any) -> jax.Array:
        """Return indices as i32. One that is no i32 becomes the largest or least i32, and no row has these numbers."""
        array = self._integers(method, indices)
        if array.dtype.itemsize > 4 or array.dtype == np.uint32:
            least = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else -MOST_ROWS - 1
            array = array.clip(least, MOST_ROWS)  # of NumPy, or of JAX: its conversion alone would wrap around
        return jnp.asarray(array, jnp.int32)

    def _integers(self, method: str, indices: Any) -> Any:
        """Return indices as an array of integers: a NumPy one if JAX might not hold their numbers."""
        array = _read(indices)
        array = array if isinstance(array, jax.Array) else np.asarray(array)
        if array.dtype == np.float64 and not array.size:  # an empty list
            array = array.astype(np.int32)
        refusal = indices_refusal(ArrayType(self.dtype, self.shape), ArrayType(array.dtype, array.shape))
        if refusal is not None:
            raise VariableShapeError(
                f"sharded variable {self.name!r} of {self.shape} has no {method} here: {refusal}",
                "give it integers that count along the first dimension",
            )
        return array

    def _scatter(self, kind: str, indices: Any, rows: Any) -> None:
        shards = self._variables(kind)
        given = self._indices(kind, indices)
        check_number(rows, f"{kind} of sharded variable {self.name!r}")
        rows = jnp.asarray(_read(rows))
        wanted = (*given.shape, *self.shape[1:])
        if rows.shape != wanted or jnp.promote_types(rows.dtype, self.dtype) != self.dtype:
            raise VariableShapeError(
                f"{kind} of sharded variable {self.name!r}: expected rows of {wanted} and {self.dtype}, got "
                f"{rows.shape} and {rows.dtype}",
                "give a row of its dtype for each index",
            )
        if not rows.size:
            return
        with own_scope(kind, self.name):
            numbers = jnp.where(given < 0, given + self.shape[0], given).reshape(-1)
            rows = rows.astype(self.dtype).reshape(-1, *self.shape[1:])
            way = route(self.layout, numbers)
            if self.layout.axis == 0:
                for shard, positions, each in zip(shards, way.rows, combined(kind, way, rows), strict=True):
                    getattr(shard, kind)(positions, each)
            else:
                for number, shard in enumerate(shards):
                    [each] = combined(kind, way, self.layout.part(number).of(rows))
                    getattr(shard, kind)(way.rows[0], each)

    def _on_shards(self, method: str, fn: Callable[[Any, Any], Any]) -> list[Any]:
        """Return `fn(value, part)` of each shard, computed where it is."""
        found = []
        for number, shard in enumerate(self._variables(method)):
            with colocate_with(shard):
                found.append(fn(shard.read(), self.layout.part(number)))
        return found

    def _reduced(self, reduce: Callable[..., Any], join: Callable[[Any, Any], Any], axis: int | None) -> jax.Array:
        if axis is not None and not -self.ndim <= axis < self.ndim:
            raise VariableShapeError(
                f"axis of a reduction of {self.shape}: expected {-self.ndim} to {self.ndim - 1}, got {axis}",
                "give one of its dimensions",
            )
        axis = axis if axis is None else axis % self.ndim
        parts = self._on_shards("a reduction", lambda shard, _: reduce(shard, axis=axis))
        if axis is not None and axis != self.layout.axis:
            return self.layout.joined(parts, self.layout.axis - (axis < self.layout.axis))
        whole: jax.Array = functools.reduce(join, parts)
        return whole

    def _no_product(self, shown: str) -> VariableShapeError:
        return VariableShapeError(
            f"a product with sharded variable {self.name!r}: expected matrices that fit, got {shown}",
            "take the rows that you need, or the whole by read()",
        )


def _shares(name: str, max_memory: Any, parts: Sequence[AxisSlice], type: ArrayType) -> list[int | None]:
    """Return the shards' shares of a limit of memory. Raises VariableError if one of them is too small."""
    if max_memory is None:
        return [None] * len(parts)
    size, is_number = max(1, type.shape[parts[0].axis]), isinstance(max_memory, int | np.integer)
    least = max(-(-LEAST_MEMORY * size // max(1, part.size)) for part in parts)
    if not is_number or isinstance(max_memory, bool) or max_memory < least:
        each = f" ({LEAST_MEMORY} for each of {len(parts)} shards)" if len(parts) > 1 else ""
        raise VariableError(
            f"max_memory of {name!r}: expected a number of bytes, at least {least}{each}, got {max_memory!r}",
            "give more, or leave it out",
        )
    return [int(max_memory) * part.size // size for part in parts]


def checked_numbers(numbers: Any, size: int, table: str, noun: str = IDS) -> Any:
    """The integers, if each is from 0 to `size` - 1. Raises InputError while the step runs; see `id_checks`."""
    if isinstance(numbers, jax.Array):
        return checked_ids(numbers, size=size, table=table, noun=noun)
    check_ids(numbers, size, table, at(caller()), noun)
    return numbers


def _read(value: Any) -> Any:
    if isinstance(value, RowGradient):
        return value.dense()
    return value.read() if isinstance(value, Variable | ShardedVariable) else value


def _looked_up(shard: Variable, rows: Any, count: Any) -> Any:
    """The rows of a shard at row numbers of a `Route`: values in the first `count`, zero in the others."""
    return first_rows(gather_p.bind(rows, handle=shard.handle, once=True), count)


def _product(one: Any, other: Any) -> Any:
    return jnp.matmul(one, other, preferred_element_type=sum_dtype(jnp.result_type(one, other)))


def _sum_of_products(parts: Sequence[Any], dtype: Any) -> jax.Array:
    total: jax.Array = functools.reduce(jnp.add, parts)
    return total.astype(dtype)


def _flattened(variable: ShardedVariable) -> tuple[Any, Any]:
    keys = map(jax.tree_util.SequenceKey, range(len(variable.shards)))
    return tuple(zip(keys, variable.shards, strict=True)), (variable.layout, variable.name)


def unflattened(cls: type[Any], about: Any, shards: Any) -> Any:
    """A sharded variable of class `cls` with these values instead of variables."""
    made = object.__new__(cls)
    made.layout, made.name = about
    made.shards = tuple(shards)
    return made


def register(cls: type[Any]) -> None:
    """Make a class of sharded variables a pytree of the shards."""
    jax.tree_util.register_pytree_with_keys(cls, _flattened, lambda about, shards: unflattened(cls, about, shards))


register(ShardedVariable)
