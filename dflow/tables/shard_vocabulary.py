"""The ids of one shard of a table: a hash table of buckets, beside the shard.

Not a dict or a library's table: a step reads and changes it within its program, on the device of the shard.

Bucket b of a shard has its rows from b * (S + 1) on: S rows that ids own, and one that the bucket's other ids share. An
id belongs to one bucket, and owns one of its rows or none.

A lookup only reads. The update of the table gives rows to ids, and takes them from others, in the program that applies
the gradients, so no other step sees a part of it. The clock of the shard counts the updates. A row has the time of its
id's arrival (`born`; 0 for a row without id) and of its last use (`seen`).

Invariants:
- A lookup at time c sees the ids that were born at c or before. So an id that a synchronous step admits, which is born
  at c + 1, is invisible until the update of that step, when its row is known to have no gradient of the id before it.
- An update with gradients of lookups at time c leaves out the rows born after c: their id was another one.
- An id seen at c + 1 is not evicted until the clock is c + 1: it is in use.
- With `expire_after` N, an id seen at c - N or before has no row at c, and nothing is written when that comes. A lookup
  judges at its time c, and the update that brings the clock to c + 1 at c too. When the id gets a row again, the same
  program frees the old one, so that no id owns two at any N.
- `seen` of the shard's first shared row is the clock, so that a checkpoint has it, whatever ids were used last.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflow.calls.function import jit
from dflow.scopes import colocate_with
from dflow.tables.id_routing import bucket_of
from dflow.tables.vocabulary import ShardRows, Vocabulary, VocabularyCounts
from dflow.tracing.devices.device import WITH_CALLER, device_scope, with_state
from dflow.tracing.errors import GraphTypeError
from dflow.tracing.ir.id_hash import mixed, mixed_bits
from dflow.tracing.own_scopes import own_scope
from dflow.tracing.primitives.running_sums import running_sums
from dflow.tracing.rows.id_rows import IdRows
from dflow.tracing.rows.lookups import RowsFound
from dflow.tracing.state.resources import Variable
from dflow.tracing.state.variable_hooks import VariableHooks

LOGGER = logging.getLogger("dflow")
#: Number of new ids that get rows together: a step takes as long for them as there are blocks of these. XLA makes two
#: kernels of a sum over more than 32 elements.
BLOCK = 32
#: The position of each count in the variable `ledger`, which begins with the clock; a count has its low and high bits.
_POSITIONS = {name: 1 + 2 * number for number, name in enumerate(VocabularyCounts._fields)}

_LAST = np.uint32(2**32 - 1)


def first_ledger() -> jax.Array:
    """The initial value of the variable `ledger`: the clock at 1, and no counts."""
    return jnp.zeros(1 + 2 * len(_POSITIONS), jnp.uint32).at[0].set(1)


class ShardVocabulary(VariableHooks):
    """The ids of the rows of `shard`.

    config     the user's settings
    buckets    number of buckets of the table, and the number of the shard's first one
    initial    from numbers of rows in the table, i32[n], to their initial values
    saved      variables by name: `ids` u32[rows, 2], `born` and `seen` u32[rows]; with `lfu` also `uses` u32[rows], and
               with `admit_after` > 1 `sightings` u32[rows]
    ledger     a variable that begins with `first_ledger`
    seen       the `seen` of all shards, a `ShardedVariable`
    """

    def __init__(
        self,
        shard: Variable,
        config: Vocabulary,
        buckets: tuple[int, int],
        initial: Callable[[Any], Any],
        saved: Mapping[str, Variable],
        ledger: Variable,
        seen: Any,
    ) -> None:
        self._shard, self.config, self._initial = shard, config, initial
        self._buckets, self._first = buckets
        self.saved, self.ledger = saved, ledger
        self._ids, self._born, self._seen = saved["ids"], saved["born"], saved["seen"]
        self._seen_of_table = seen
        self._row_count = shard.shape[0]
        self._own_buckets = self._row_count // (config.bucket + 1)
        beside = (self._ids.name, self._born.name, self._seen.name, ledger.name)
        self.id_rows = IdRows(config.numbers, *buckets, *beside)
        #: The slots of the shard's optimizers, whose rows begin again with those of the shard.
        self._slots: list[weakref.ref[Any]] = []
        #: Number of refused ids that was last warned of.
        self._warned_of = 0

    def find(self, ids: Any, count: Any) -> ShardRows:
        """Return the rows of ids, u32[n, 2]; the first `count` count."""
        with colocate_with(self._shard):
            # The clock is read with the ids, not earlier, though it is known without them.
            _, ledger = jax.lax.optimization_barrier((count, self.ledger.read()))
            clock = ledger[0]
            (bucket, _), is_id = self._hashed(ids), jnp.arange(ids.shape[0]) < count
            row = self._row(bucket, self._cell(ids, bucket, clock))
            shared = self._row(bucket, np.uint32(self.config.bucket))
            row = jnp.where(self._has_expired(row, clock), shared, row).astype(jnp.int32)
            return ShardRows(ids, count, jnp.where(is_id, row, self._row_count), clock)

    def rows_now(self, looked: ShardRows) -> Any:
        """Return the rows of ids that were found earlier: the shared one for an id that has lost its own, i32[n]."""
        with colocate_with(self._shard):
            is_own = _rows_at(self._born.read(), looked.rows) <= looked.clock
            if self.config.expire_after is not None:
                is_own &= ~self._has_expired(looked.rows, self._clock())
            # Unsigned: a gather repeats the division for each element of a row, and that of signed numbers is longer.
            bucket = looked.rows.astype(jnp.uint32) // np.uint32(self.config.bucket + 1)
            shared = self._row(bucket, np.uint32(self.config.bucket)).astype(jnp.int32)
            return jnp.where(is_own, looked.rows, shared)

    def gradient_rows(self, found: RowsFound) -> RowsFound:
        """Have the indices, which the lookup found, known after it: an update must read what it changes later."""
        with device_scope(self._shard.device or WITH_CALLER):
            indices, rows = jax.lax.optimization_barrier((found.indices, found.rows))
        return RowsFound(indices, rows, found.once)

    def note_slots(self, slots: Any) -> None:
        """See `VariableHooks`."""
        self._slots.append(weakref.ref(slots))

    def refuse_nothing_found(self) -> None:
        """See `VariableHooks`."""
        raise GraphTypeError(
            f"apply: expected found=, the ids found in table {self._shard.name.rpartition('/')[0]!r}, got none",
            "write found = table.find(ids) before the loss, look up table(found) in it, and call "
            "optimizer.apply(gradients, found=found)",
        )

    def begin_update(self, update: Any, found: Sequence[ShardRows] | None) -> Any:
        """Begin an update of the shard's rows; return a mask of the rows that still have the ids of the gradients.

        In a synchronous step, none of the ids seen until now can have lost its row.
        """
        with with_state(), own_scope("begin update of", self._shard.name):
            seen_at = clock = self._clock()
            for one in found or ():
                seen_at = jnp.minimum(seen_at, one.clock)
            # What follows comes after the gradients, however early it is known. So the rows are still those of the mask
            # when they are updated, which is in the same program.
            _, seen_at, clock = jax.lax.optimization_barrier((jnp.sum(update), seen_at, clock))
            self._set_clock(clock + 1, _zero_after(found or (), update))
            return self._born.read() <= seen_at

    @jit
    def admit(self, found: Sequence[ShardRows], update: Any = None) -> None:
        """Note the use of ids, and give rows to ids without one: free rows, or rows of other ids."""
        if not found:  # a lookup of no ids
            return
        with with_state(), own_scope("admit to", self._shard.name):
            clock = self._clock()
            now = clock + 1 if update is None else clock
            offset = _zero_after(found, update)
            used = self._used([jax.lax.optimization_barrier((*one, clock)) for one in found])  # as in `begin_update`
            are_new, counted = self._note_use(used, now, offset, update is not None)
            offset += jnp.minimum(counted["left_out"].astype(jnp.int32), 0)  # reads too
            self._note_counts(counted | self._give_rows(used, are_new, now, offset))

    @jit
    def restored(self) -> None:
        """Set the clock to that of the checkpoint, or to the last use of an id in one that has no clock."""
        with with_state():
            self._set_clock(jnp.maximum(self._seen_of_table.max(), 1))

    @property
    def capacity(self) -> int:
        """Number of ids that can have a row of their own."""
        return self._own_buckets * self.config.bucket

    @jit
    def used_rows(self) -> Any:
        """Return the number of ids that have a row of their own, i32[]."""
        with colocate_with(self._shard):
            born = self._born.read()  # 0 for the shared rows
            return jnp.sum((born > 0) & ~self._is_old(self._seen.read(), self._clock()), dtype=jnp.int32)

    def counts(self) -> VocabularyCounts:
        """The counts of this shard. Logs a warning if ids were refused rows: the first time, and when twice as many."""
        ledger = np.asarray(self.ledger.read()).astype(object)
        found = VocabularyCounts(
            *(int(ledger[position] + (ledger[position + 1] << 32)) for position in _POSITIONS.values())
        )
        if found.overflowed >= max(1, 2 * self._warned_of):
            self._warned_of = found.overflowed
            LOGGER.warning(
                "table %r: ids were refused a row %d times in one shard, and share one, since all rows of their bucket "
                "were in use: give the table more rows, or its vocabulary a larger bucket",
                self._shard.name.rpartition("/")[0],
                found.overflowed,
            )
        return found

    def _used(self, found: Sequence[Sequence[Any]]) -> _Used:
        """Return the results of several lookups as one; each is the values of a `ShardRows` and the clock now."""
        ids, rows = (jnp.concatenate([one[place] for one in found]) for place in (0, 2))
        clocks = jnp.concatenate([jnp.full(one[2].shape, one[3]) for one in found])
        is_id = jnp.concatenate([jnp.arange(one[2].shape[0]) < one[1] for one in found])
        count = sum(one[1].astype(jnp.uint32) for one in found)
        return _Used(ids, *self._hashed(ids), rows, clocks, is_id, count)

    def _note_use(self, used: _Used, now: Any, offset: Any, is_update: bool) -> tuple[Any, dict[str, Any]]:
        """Note the use of the ids that have rows; return a mask of the others that are to get one, and counts."""
        is_id, own = used.is_id, self.config.bucket
        had_own = is_id & (used.rows.astype(jnp.uint32) % np.uint32(own + 1) != own)
        counted = {"found": _number(had_own), "left_out": jnp.uint32(0)}
        counted["shared"] = used.count - counted["found"]
        cell = self._cell(used.ids, used.bucket)
        rows = self._row(used.bucket, cell)
        has_expired = (cell < own) & self._has_expired(rows, now - 1)
        if is_update:
            is_other = _rows_at(self._born.read(), jnp.where(had_own, used.rows, 0)) > used.clocks
            counted["left_out"] = _number(had_own & (is_other | has_expired))
        has_row = is_id & (cell < own) & ~has_expired
        rows = jnp.where(has_row, rows + offset.astype(jnp.uint32), np.uint32(self._row_count))
        self._seen.scatter_update(rows, jnp.full(rows.shape, now))
        if "uses" in self.saved:
            self._count_once(self.saved["uses"], rows)
        are_new = is_id & ~has_row
        if self.config.admit_after == 1:
            return are_new, counted
        sightings = self.saved["sightings"]
        self._count_once(sightings, self._counter(used.bucket, used.hashed, are_new))
        seen = _rows_at(sightings.read(), self._counter(used.bucket, used.hashed, is_id))
        return are_new & (seen >= self.config.admit_after), counted

    def _give_rows(self, used: _Used, are_new: Any, now: Any, offset: Any) -> dict[str, Any]:
        """Give rows to the ids of a mask in their order, as far as their buckets have rows that are free or not in use.

        Returns the numbers of ids `admitted`, `evicted` and `overflowed`.

        A round is about a block of ids, and gives a row to the first one of each bucket. The next round begins at the
        first id of the block that was not its bucket's first, so usually there are as many rounds as blocks.
        """
        ranks = running_sums(are_new).astype(jnp.uint32)
        count = ranks[-1]
        room: Any = ranks.shape[0] + BLOCK  # a block may begin at the last id; symbolic in exports
        ids = jnp.zeros((room, 2), jnp.uint32)
        end = np.uint32(room) if isinstance(room, int) else jnp.asarray(room).astype(jnp.uint32)
        ids = ids.at[jnp.where(are_new, ranks - 1, end)].set(used.ids, mode="drop")
        positions, names = jnp.arange(BLOCK, dtype=jnp.uint32), ("admitted", "evicted", "overflowed")

        def give(state: Any) -> Any:
            start, counted = state
            own = jax.lax.dynamic_slice(ids, (start, np.uint32(0)), (BLOCK, 2))
            bucket, hashed = self._hashed(own)
            last_cell = self._cell(own, bucket)
            had_row, last_row = last_cell < self.config.bucket, self._row(bucket, last_cell)
            # An id may have got a row in an earlier round, also as one of another lookup of this step.
            is_waiting = (start + positions < count) & (~had_row | self._has_expired(last_row, now - 1))
            cell, lowest = _lowest(self._order(bucket, now))
            is_refused = is_waiting & (lowest == _LAST)
            is_admitted = is_waiting & (lowest != _LAST) & _is_first(bucket, is_waiting)
            rows = jnp.where(is_admitted, self._row(bucket, cell), np.uint32(self._row_count))
            if self.config.expire_after is not None:
                old = jnp.where(is_admitted & had_row, last_row, np.uint32(self._row_count))
                self._born.scatter_update(old, jnp.zeros(BLOCK, jnp.uint32))
            self._begin_rows(rows, own, now)
            if self.config.admit_after > 1:
                counter = self._counter(bucket, hashed, is_admitted)
                self.saved["sightings"].scatter_update(counter, jnp.zeros(BLOCK, jnp.uint32))
            must_wait = is_waiting & ~is_admitted & ~is_refused
            following = start + jnp.where(must_wait, positions, np.uint32(BLOCK)).min()
            # An id that is refused is refused again in the next round, if that has it.
            is_counted = start + positions < following
            masks = is_admitted, is_admitted & (lowest > 0), is_refused & is_counted
            return following, counted + _numbers(masks)

        first = offset.astype(jnp.uint32), jnp.zeros(len(names), jnp.uint32)
        _, counted = jax.lax.while_loop(lambda state: state[0] < count, give, first)
        return {name: counted[number] for number, name in enumerate(names)}

    def _order(self, bucket: Any, now: Any) -> Any:
        """When each row of buckets is given away, u32[n, S]: lowest first; 0 is a free row, the largest one in use."""
        born, seen = self._by_bucket(self._born, bucket), self._by_bucket(self._seen, bucket)
        score = self._by_bucket(self.saved["uses"], bucket) if "uses" in self.saved else seen
        is_free = (born == 0) | self._is_old(seen, now - 1)
        return jnp.where(is_free, 0, jnp.where(seen == now, _LAST, jnp.minimum(score, _LAST - 1)))

    def _begin_rows(self, rows: Any, ids: Any, now: Any) -> None:
        """Give rows to ids, and set those of the shard, and of the optimizers' slots, to their initial values."""
        for variable, value in ((self._ids, ids), (self._born, now), (self._seen, now), (self.saved.get("uses"), 1)):
            if variable is not None:
                whole = jnp.broadcast_to(jnp.asarray(value, jnp.uint32), (*rows.shape, *variable.shape[1:]))
                variable.scatter_update(rows, whole)
        inside = jnp.minimum(rows, np.uint32(self._row_count - 1)).astype(jnp.int32)
        values = self._initial(inside + self._first * (self.config.bucket + 1))
        self._shard.scatter_update(rows, values)
        for slots in filter(None, (reference() for reference in self._slots)):
            for slot, initial in slots.initial_rows(self._shard, values):
                slot.scatter_update(rows, initial)

    def _clock(self) -> Any:
        return self.ledger.read()[0]

    def _count_once(self, counters: Variable, positions: Any) -> None:
        # Not by `scatter_add`: several lookups of a step may have found one id.
        counters.scatter_update(positions, _rows_at(counters.read(), positions) + 1)

    def _set_clock(self, clock: Any, offset: Any = 0) -> None:
        self.ledger.scatter_update(jnp.zeros(1, jnp.uint32), clock[None])
        at = jnp.full(1, self.config.bucket, jnp.uint32) + jnp.uint32(offset)
        self._seen.scatter_update(at, clock[None])

    def _note_counts(self, counted: Mapping[str, Any]) -> None:
        """Add numbers to the counts, whose upper bits have positions of their own."""
        ledger = self.ledger.read()
        more = jnp.stack([counted[name] for name in _POSITIONS])
        low = ledger[1::2] + more
        high = ledger[2::2] + (low < more)
        self.ledger.assign(jnp.concatenate([ledger[:1], jnp.stack([low, high], 1).reshape(-1)]))

    def _hashed(self, ids: Any) -> tuple[Any, Any]:
        """The number in this shard of the bucket of each id, and a hash of the id."""
        bucket = bucket_of(ids[:, 0], ids[:, 1], self._buckets).astype(jnp.uint32) - np.uint32(self._first)
        # Of another shard are the zeros after the ids.
        return jnp.minimum(bucket, np.uint32(self._own_buckets - 1)), mixed(ids[:, 0], ids[:, 1])

    def _by_bucket(self, variable: Variable, bucket: Any) -> Any:
        """The elements of the rows of buckets that ids may own, [n, S, ...]."""
        value, each = variable.read(), self.config.bucket + 1
        return _rows_at(value.reshape(self._own_buckets, each, *value.shape[1:]), bucket)[:, :-1]

    def _has_expired(self, rows: Any, clock: Any) -> Any:
        """Whether the last use of each row's id is `expire_after` updates or more before the clock."""
        if self.config.expire_after is None:
            return jnp.zeros(rows.shape, bool)
        return self._is_old(_rows_at(self._seen.read(), rows), clock)

    def _is_old(self, seen: Any, clock: Any) -> Any:
        if self.config.expire_after is None:
            return jnp.zeros(seen.shape, bool)
        most = np.uint32(self.config.expire_after)
        return seen <= jnp.maximum(clock, most) - most  # no less than 0, which no id has

    def _cell(self, ids: Any, bucket: Any, born_by: Any = _LAST) -> Any:
        """The position in its bucket of the row that each id owns, if it was born by a time, i32[n]; else S."""
        born = self._by_bucket(self._born, bucket)
        is_own = (self._by_bucket(self._ids, bucket) == ids[:, None]).all(-1) & (born > 0) & (born <= born_by)
        # XLA takes a CPU three times as long for `argmax`.
        own = np.uint32(self.config.bucket)
        return jnp.where(is_own, jnp.arange(own, dtype=jnp.uint32), own).min(1)

    def _row(self, bucket: Any, cell: Any) -> Any:
        return bucket * np.uint32(self.config.bucket + 1) + cell

    def _counter(self, bucket: Any, hashed: Any, mask: Any) -> Any:
        """The position of the counter of each id; past the end for ids outside of the mask."""
        position = self._row(bucket, mixed_bits(hashed) % np.uint32(self.config.bucket))
        return jnp.where(mask, position, np.uint32(self._row_count))


class _Used(NamedTuple):
    """Ids that are used in an update, u32[n, 2], with the bucket and a hash of each.

    rows    i32[n], where lookups found them
    clocks  u32[n], the time of the lookup
    is_id   bool[n], whether it is one
    count   u32[], the number of ids
    """

    ids: Any
    bucket: Any
    hashed: Any
    rows: Any
    clocks: Any
    is_id: Any
    count: Any


def _zero_after(found: Sequence[ShardRows], update: Any) -> Any:
    """Return an offset of rows, i32[], that is 0 and depends on lookups and on an update, if there is one.

    XLA copies a variable if a write of it does not depend on all reads of the old value.
    """
    offset = sum((jnp.minimum(jnp.min(one.rows), 0) for one in found), jnp.int32(0))
    if update is not None:
        total = jnp.sum(update)
        offset += (jnp.isnan(total) & jnp.isfinite(total)).astype(jnp.int32)
    return offset


def _number(mask: Any) -> Any:
    return mask.sum(dtype=jnp.uint32)


def _numbers(masks: Sequence[Any]) -> Any:
    """The number of elements of each of three masks of a block, u32[3], by one sum: XLA makes kernels for each sum."""
    bits = BLOCK.bit_length()
    together = sum(mask.astype(jnp.uint32) << (bits * number) for number, mask in enumerate(masks)).sum()
    return (together >> (bits * jnp.arange(len(masks), dtype=jnp.uint32))) & np.uint32((1 << bits) - 1)


def _rows_at(value: Any, positions: Any) -> Any:
    """The rows of an array at positions, u32[n]; the last one for a position past the end.

    Unsigned positions, as JAX asks of signed ones whether they are negative.
    """
    return value.at[positions.astype(jnp.uint32)].get(mode="clip")


def _lowest(order: Any) -> tuple[Any, Any]:
    """The first position of the lowest element of each row of u32[n, S], u32[n], and that element."""
    lowest = order.min(1)
    positions, count = jnp.arange(order.shape[1], dtype=jnp.uint32), np.uint32(order.shape[1])
    return jnp.where(order == lowest[:, None], positions, count).min(1), lowest


def _is_first(bucket: Any, mask: Any) -> Any:
    """Whether no element of a mask before it is of the same bucket, bool[n]."""
    position = jnp.arange(bucket.shape[0])
    is_before = (position < position[:, None]) & mask & (bucket == bucket[:, None])
    return ~is_before.any(1)
