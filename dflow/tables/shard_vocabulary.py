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
from dflow.tracing.ir.each_once import mixed_bits
from dflow.tracing.own_scopes import own_scope
from dflow.tracing.primitives.running_sums import running_sums
from dflow.tracing.rows.lookups import RowsFound
from dflow.tracing.state.resources import Variable
from dflow.tracing.state.variable_hooks import VariableHooks
from dflow.tracing.wide_ids import mixed

#: Number of new rows whose initial values are computed together: a step computes as many blocks as it has new ids.
BLOCK = 64
#: The position of each count in the variable `ledger`, which begins with the clock; a count has its low and high bits.
_POSITIONS = {name: 1 + 2 * number for number, name in enumerate(VocabularyCounts._fields)}
#: The position of the time when ids were last refused a row.
_REFUSED_AT = 1 + 2 * len(_POSITIONS)

_LAST = np.uint32(2**32 - 1)


def first_ledger() -> jax.Array:
    """The initial value of the variable `ledger`: the clock at 1, and no counts."""
    return jnp.zeros(_REFUSED_AT + 1, jnp.uint32).at[0].set(1)


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
        #: The slots of the shard's optimizers, whose rows begin again with those of the shard.
        self._slots: list[weakref.ref[Any]] = []

    def find(self, ids: Any, count: Any) -> ShardRows:
        """Return the rows of ids, u32[n, 2]; the first `count` count."""
        with colocate_with(self._shard):
            # The clock is read with the ids, not earlier, though it is known without them.
            _, ledger = jax.lax.optimization_barrier((count, self.ledger.read()))
            clock = ledger[0]
            refused = jnp.where(ledger[_REFUSED_AT] == clock, ledger[_POSITIONS["overflowed"]], 0)
            (bucket, _), is_id = self._hashed(ids), jnp.arange(ids.shape[0]) < count
            born = self._by_bucket(self._born, bucket)
            is_there = self._is_there(ids, bucket) & (born > 0) & (born <= clock)
            row, shared = self._row(bucket, jnp.argmax(is_there, 1)), self._row(bucket, jnp.int32(self.config.bucket))
            row = jnp.where(is_there.any(1) & ~self._has_expired(row, clock), row, shared)
            return ShardRows(ids, count, jnp.where(is_id, row, self._row_count), clock, refused)

    def rows_now(self, looked: ShardRows) -> Any:
        """Return the rows of ids that were found earlier: the shared one for an id that has lost its own, i32[n]."""
        with colocate_with(self._shard):
            rows = jnp.minimum(looked.rows, self._row_count - 1)
            is_own = self._born.read()[rows] <= looked.clock
            if self.config.expire_after is not None:
                is_own &= ~self._has_expired(rows, self._clock())
            shared = self._row(looked.rows // (self.config.bucket + 1), jnp.int32(self.config.bucket))
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

    def admit(self, found: Sequence[ShardRows], update: Any = None) -> None:
        """Note the use of ids, and give rows to ids without one: free rows, or rows of other ids."""
        with with_state(), own_scope("admit to", self._shard.name):
            clock = self._clock()
            now = clock + 1 if update is None else clock
            offset = _zero_after(found, update)
            used = []
            for one in found:
                *tied, _ = jax.lax.optimization_barrier((*one, clock))  # as in `begin_update`
                looked = ShardRows(*tied)
                used.append(_Used(looked, *self._hashed(looked.ids), jnp.arange(looked.ids.shape[0]) < looked.count))
            counted = dict.fromkeys(VocabularyCounts._fields, jnp.uint32(0))
            unknown = [self._note_use(each, now, offset, update is not None, counted) for each in used]
            for each, are_new in zip(used, unknown, strict=True):
                self._give_rows(each, are_new, now, offset, counted)
            self._note_counts(counted, now)

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
        """The counts of this shard."""
        ledger = np.asarray(self.ledger.read()).astype(object)
        return VocabularyCounts(
            *(int(ledger[position] + (ledger[position + 1] << 32)) for position in _POSITIONS.values())
        )

    def _note_use(self, used: _Used, now: Any, offset: Any, is_update: bool, counted: dict[str, Any]) -> Any:
        """Note the use of the ids that have rows; return a mask of the others that are to get one."""
        looked, is_id = used.looked, used.is_id
        has_own = is_id & (looked.rows % (self.config.bucket + 1) != self.config.bucket)
        counted["found"] += _number(has_own)
        counted["shared"] += _number(is_id & ~has_own)
        born = self._by_bucket(self._born, used.bucket)
        is_there = self._is_there(looked.ids, used.bucket) & (born > 0)
        rows = self._row(used.bucket, jnp.argmax(is_there, 1))
        has_expired = is_there.any(1) & self._has_expired(rows, now - 1)
        if is_update:
            cell = jnp.where(has_own, looked.rows % (self.config.bucket + 1), 0)
            now_born = jnp.take_along_axis(born, cell[:, None], 1)[:, 0]
            counted["left_out"] += _number(has_own & ((now_born > looked.clock) | has_expired))
        has_row = is_id & is_there.any(1) & ~has_expired
        rows = jnp.where(has_row, rows + offset, self._row_count)
        self._seen.scatter_update(rows, jnp.full(rows.shape, now))
        if "uses" in self.saved:
            self.saved["uses"].scatter_add(rows, jnp.ones(rows.shape, jnp.uint32))
        are_new = is_id & ~has_row
        if self.config.admit_after == 1:
            return are_new
        sightings = self.saved["sightings"]
        sightings.scatter_add(self._counter(used, are_new), jnp.ones(rows.shape, jnp.uint32))
        seen = sightings.read()[self._counter(used, is_id)]
        return are_new & (seen >= self.config.admit_after)

    def _give_rows(self, used: _Used, are_new: Any, now: Any, offset: Any, counted: dict[str, Any]) -> None:
        """Give rows to the ids of a mask, as far as their buckets have rows that are free or not in use."""
        bucket, ids = used.bucket, used.looked.ids
        born, seen = self._by_bucket(self._born, bucket), self._by_bucket(self._seen, bucket)
        is_there, is_free = self._is_there(ids, bucket) & (born > 0), (born == 0) | self._is_old(seen, now - 1)
        # An id of an earlier lookup of this step may be here again.
        are_new &= ~(is_there & ~is_free).any(1)
        score = self._by_bucket(self.saved["uses"], bucket) if "uses" in self.saved else seen
        order = jnp.where(is_free, 0, jnp.where(seen == now, _LAST, jnp.minimum(score, _LAST - 1)))
        cell, evicts = _cells(order, _ranks(bucket, are_new), are_new)
        admitted = cell >= 0
        rows = jnp.where(admitted, self._row(bucket, cell) + offset, self._row_count)
        if self.config.expire_after is not None:
            old = self._row(bucket, jnp.argmax(is_there, 1)) + offset
            self._born.scatter_update(
                jnp.where(admitted & is_there.any(1), old, self._row_count), jnp.zeros(rows.shape, jnp.uint32)
            )
        for variable, value in ((self._ids, ids), (self._born, now), (self._seen, now), (self.saved.get("uses"), 1)):
            if variable is not None:
                whole = jnp.broadcast_to(jnp.asarray(value, jnp.uint32), (*rows.shape, *variable.shape[1:]))
                variable.scatter_update(rows, whole)
        if self.config.admit_after > 1:
            self.saved["sightings"].scatter_update(self._counter(used, admitted), jnp.zeros(rows.shape, jnp.uint32))
        counted["admitted"] += _number(admitted)
        counted["evicted"] += _number(evicts)
        counted["overflowed"] += _number(are_new & ~admitted)
        self._begin_rows(rows, admitted)

    def _begin_rows(self, rows: Any, are_new: Any) -> None:
        """Set new rows of the shard, and of the optimizers' slots, to their initial values."""
        blocks = -(-rows.shape[0] // BLOCK)
        ranks = running_sums(are_new.astype(jnp.int32))
        positions = jnp.where(are_new, ranks - 1, blocks * BLOCK)
        # The new rows first: usually they are few.
        rows = jnp.full(blocks * BLOCK, self._row_count, jnp.int32).at[positions].set(rows, mode="drop")

        def block(state: Any) -> Any:
            number, values = state
            own = jax.lax.dynamic_slice_in_dim(rows, number * BLOCK, BLOCK)
            initial = self._initial(jnp.minimum(own, self._row_count - 1))
            return number + 1, jax.lax.dynamic_update_slice_in_dim(values, initial, number * BLOCK, 0)

        values = jnp.zeros((blocks * BLOCK, *self._shard.shape[1:]), self._shard.dtype)
        _, values = jax.lax.while_loop(lambda state: state[0] * BLOCK < ranks[-1], block, (jnp.int32(0), values))
        self._shard.scatter_update(rows, values)
        for slots in filter(None, (reference() for reference in self._slots)):
            for slot, initial in slots.initial_rows(self._shard, values):
                slot.scatter_update(rows, initial)

    def _clock(self) -> Any:
        return self.ledger.read()[0]

    def _set_clock(self, clock: Any, offset: Any = 0) -> None:
        self.ledger.scatter_update(jnp.zeros(1, jnp.int32), clock[None])
        self._seen.scatter_update(jnp.full(1, self.config.bucket, jnp.int32) + offset, clock[None])

    def _note_counts(self, counted: Mapping[str, Any], now: Any) -> None:
        """Add numbers to the counts, whose upper bits have positions of their own."""
        ledger = self.ledger.read()
        more = jnp.stack([counted[name] for name in _POSITIONS])
        low = ledger[1:_REFUSED_AT:2] + more
        high = ledger[2:_REFUSED_AT:2] + (low < more)
        refused_at = jnp.where(counted["overflowed"] > 0, now, ledger[_REFUSED_AT])
        counts = jnp.stack([low, high], 1).reshape(-1)
        self.ledger.assign(jnp.concatenate([ledger[:1], counts, refused_at[None]]))

    def _hashed(self, ids: Any) -> tuple[Any, Any]:
        """The number in this shard of the bucket of each id, and a hash of the id."""
        bucket = bucket_of(ids[:, 0], ids[:, 1], self._buckets) - self._first
        # Of another shard are the zeros after the ids.
        return jnp.clip(bucket, 0, self._own_buckets - 1), mixed(ids[:, 0], ids[:, 1])

    def _by_bucket(self, variable: Variable, bucket: Any) -> Any:
        """The elements of the rows of buckets that ids may own, [n, S, ...]."""
        value, each = variable.read(), self.config.bucket + 1
        return value.reshape(self._own_buckets, each, *value.shape[1:])[bucket][:, :-1]

    def _has_expired(self, rows: Any, clock: Any) -> Any:
        """Whether the ids of rows were last used too long before the clock."""
        if self.config.expire_after is None:
            return jnp.zeros(rows.shape, bool)
        return self._is_old(self._seen.read()[rows], clock)

    def _is_old(self, seen: Any, clock: Any) -> Any:
        if self.config.expire_after is None:
            return jnp.zeros(seen.shape, bool)
        most = np.uint32(self.config.expire_after)
        return seen <= jnp.maximum(clock, most) - most  # no less than 0, which no id has

    def _is_there(self, ids: Any, bucket: Any) -> Any:
        """Whether each row of its bucket has the id, or had it last, bool[n, S]."""
        return (self._by_bucket(self._ids, bucket) == ids[:, None]).all(-1)

    def _row(self, bucket: Any, cell: Any) -> Any:
        return bucket * (self.config.bucket + 1) + cell.astype(jnp.int32)

    def _counter(self, used: _Used, mask: Any) -> Any:
        """The position of the counter of each id; past the end for ids outside of the mask."""
        position = self._row(used.bucket, mixed_bits(used.hashed) % np.uint32(self.config.bucket))
        return jnp.where(mask, position, self._row_count)


class _Used(NamedTuple):
    """Ids that are used in an update: the bucket and a hash of each, and whether it is one."""

    looked: ShardRows
    bucket: Any
    hashed: Any
    is_id: Any


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


def _ranks(bucket: Any, mask: Any) -> Any:
    """The number of elements of a mask before each that are in the same bucket, i32[n]; those are neighbours."""
    before = running_sums(mask.astype(jnp.int32)) - mask
    is_first = jnp.concatenate([jnp.ones(1, bool), bucket[1:] != bucket[:-1]])
    return before - jax.lax.associative_scan(jnp.maximum, jnp.where(is_first, before, 0))


def _cells(order: Any, ranks: Any, mask: Any) -> tuple[Any, Any]:
    """The cell of each id of a mask, -1 for an id that gets none; and whether another id loses it.

    A cell is the number of a row within its bucket.

    order  u32[n, S]: an id of rank r gets the cell that is r-th in this order; 0 is a free one, the largest none
    """

    def choose(state: Any) -> Any:
        rank, order, cells, evicts = state
        cell = jnp.argmin(order, 1).astype(jnp.int32)
        lowest = order.min(1)
        chosen = mask & (ranks == rank) & (lowest != _LAST)
        order = jnp.where(jnp.arange(order.shape[1]) == cell[:, None], _LAST, order)
        return rank + 1, order, jnp.where(chosen, cell, cells), jnp.where(chosen, lowest != 0, evicts)

    end = jnp.minimum(jnp.max(jnp.where(mask, ranks + 1, 0), initial=0), order.shape[1])
    start = (jnp.int32(0), order, jnp.full(mask.shape, -1, jnp.int32), jnp.zeros(mask.shape, bool))
    _, _, cells, evicts = jax.lax.while_loop(lambda state: state[0] < end, choose, start)
    return cells, evicts
