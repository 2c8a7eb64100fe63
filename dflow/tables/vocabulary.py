"""Settings of a table with a growing vocabulary, results of its lookups, and its counts."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import jax
import numpy as np

from dflow.tracing.errors import GraphTypeError, InputError, VariableError
from dflow.tracing.near_names import suggests_fields
from dflow.tracing.source import as_code, caller

#: The rules of eviction: of the ids of a bucket, the one that was used least recently, or least frequently.
EVICTIONS = ("lru", "lfu")
#: The largest number that a setting may be.
_LARGEST = 2**32 - 1
#: Most frames between the function that flattens a pytree and `scan` or `vmap`.
_MOST_FRAMES = 8


@suggests_fields
@dataclass(frozen=True)
class Vocabulary:
    """The ids of a table grow: an id of 64 bits gets a row when it has been used, and may lose it to another id.

    `evict`       the id of a full bucket that loses its row to a new one: `lru`, used least recently, in updates of the
                  table; or `lfu`, used in the fewest steps of workers
    `admit_after`  number of workers' steps with an id until it gets a row. Ids that have none are counted in as many
                  counters as there are rows. A counter has the number of steps with any of its ids, and restarts when
                  one of them gets a row
    `bucket`      number of ids in a bucket. Each bucket also has a row that all ids without a row share
    `expire_after`  number of updates of the table, at most 2**32 - 1, after which an id that none of them used loses
                  its row: lookups give the shared one, and if the id returns, it is a new one. An update is one
                  `optimizer.apply`, with whatever ids: a step of one worker, or a round of a synchronous strategy.
                  None to keep ids until others take their rows
    raises        VariableError for other values
    """

    evict: str = "lru"
    admit_after: int = 1
    bucket: int = 32
    expire_after: int | None = None

    def __post_init__(self) -> None:
        if self.evict not in EVICTIONS:
            raise VariableError(f"evict: expected one of {EVICTIONS}, got {self.evict!r}", "give one of these")
        counts: dict[str, Any] = {"admit_after": self.admit_after, "bucket": self.bucket}
        for name, count in counts.items():
            if not (_is_integer(count) and 1 <= count <= _LARGEST):
                raise VariableError(
                    f"{name}: expected an integer from 1 to {_LARGEST}, got {count!r}", f"write {name}=1 or more"
                )
        age: Any = self.expire_after
        if age is not None and not (_is_integer(age) and 1 <= age <= _LARGEST):
            raise VariableError(
                f"expire_after: expected a number of updates from 1 to {_LARGEST}, or None, got {age!r}",
                "give the number of updates after which an id that is not used loses its row",
            )

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The settings as integers: the number of `evict` in `EVICTIONS`, and 0 without `expire_after`."""
        return EVICTIONS.index(self.evict), self.admit_after, self.bucket, self.expire_after or 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class VocabularyCounts(NamedTuple):
    """Numbers of ids in the updates of a table since it was made; an id counts once in each lookup of a worker's step.

    found       looked up in a row of their own
    shared      looked up in the row that a bucket's ids without a row share
    admitted    given a row
    evicted     of these, given the row of another id
    overflowed  refused a row, as all ids of their bucket were used since the last update
    left_out    whose gradient was left out, since another step had given their row to another id, or they had expired
    """

    found: int
    shared: int
    admitted: int
    evicted: int
    overflowed: int
    left_out: int


class ShardRows(NamedTuple):
    """Result of a lookup in one shard.

    ids    u32[n, 2]; the first `count` (i32[]) count
    rows   i32[n], their rows in the shard; past the end for the others
    clock  u32[], the clock of the shard at that moment
    """

    ids: Any
    count: Any
    rows: Any
    clock: Any


@dataclass(frozen=True, eq=False)
class FoundIds:
    """The rows of some ids in a table, at the moment of `table.find(ids)`. Use it in the same step.

    `table`   the table
    `shape`   of the ids
    `shards`  by shard, what it found
    `places`  i32[n]: of each id, the place of its row in the concatenated arrays of all shards
    """

    table: Any
    shape: tuple[int, ...]
    shards: Sequence[ShardRows]
    places: Any

    def parts_for(self, optimizer: str, variables: Container[Any]) -> dict[Any, list[ShardRows]]:
        """Return what was found, by shard, for an optimizer of `variables`. Raises GraphTypeError for another's."""
        self.check_whole()
        if not all(shard in variables for shard in self.table.shards):
            raise GraphTypeError(
                f"found: expected ids found in tables of {optimizer!r}, got ids found in {self.table.name!r}",
                "give them to the optimizer of that table",
            )
        parts: dict[Any, list[ShardRows]] = {shard: [] for shard in self.table.shards}
        for shard, part in zip(parts, self.shards, strict=bool(self.shards)):
            parts[shard].append(part)
        return parts

    def check_whole(self) -> None:
        """Raise InputError unless the arrays have the shapes that `find` gave them."""
        count = math.prod(self.shape)
        shapes = [np.shape(self.places), *(np.shape(one.ids) for one in self.shards)]
        if shapes != [(count,), *[(count, 2)] * len(self.shards)]:
            raise self.cut_error()

    def cut_error(self) -> InputError:
        """Return the error for these arrays sliced, stacked or mapped."""
        return InputError(
            f"ids found in table {self.table.name!r}: expected the result of one find as it is, got its arrays sliced, "
            f"stacked or mapped, as by scan, vmap or jax.tree.map",
            f"loop over the ids, and find, look up and apply in each iteration; or find them once, and loop over the "
            f"rows {as_code(self.table.name)}(found)",
            at=caller(),
        )


def _flattened(found: FoundIds) -> tuple[Any, Any]:
    if _is_cut(found):
        raise found.cut_error()
    # JAX keeps the trees of arguments after the call: they must not keep the table, and its variables, alive.
    return (found.shards, found.places), (ref(found.table), found.shape)


def _unflattened(about: tuple[ref[Any], tuple[int, ...]], parts: Any) -> FoundIds:
    table, shape = about[0](), about[1]
    if table is None:
        raise VariableError("expected found ids of a table in use, got those of one that is gone", "keep the table")
    return FoundIds(table, shape, *parts)


jax.tree_util.register_pytree_node(FoundIds, _flattened, _unflattened)


def _is_cut(part: Any) -> bool:
    """Return whether JAX flattens `part`, now, for a `scan` over it or a `vmap` of it.

    Else JAX would slice the arrays of the pytree, and fail with an error about ranks and lengths. It flattens it first:
    the frames of that call show whether `scan` or `vmap` made it.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or not str(frame.f_globals.get("__name__")).startswith(("jax.", "dflow.tables")):
            return False
        held = frame.f_locals
        if frame.f_code.co_name == "scan" and "xs" in held:
            return _is_in(part, held["xs"])
        if frame.f_code.co_name == "vmap_f" and "args" in held:
            return _is_mapped(part, held["args"], held.get("in_axes"))
        frame = frame.f_back
    return False


def _is_mapped(part: Any, args: tuple[Any, ...], in_axes: Any) -> bool:
    axes = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
    return any(axis is not None and _is_in(part, arg) for arg, axis in zip(args, axes, strict=False))


def _is_in(part: Any, whole: Any) -> bool:
    # Its own flattening, which asks again, is not reached: it is a leaf here.
    leaves = jax.tree_util.tree_leaves(whole, is_leaf=lambda one: one is part)
    return any(one is part for one in leaves)
