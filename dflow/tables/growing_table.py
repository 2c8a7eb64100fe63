"""A table with a growing vocabulary: lookups of ids of 64 bits over the shards, each with its own ids."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.calls.function import jit
from dflow.scopes import colocate_with
from dflow.tables.id_routing import route_ids
from dflow.tables.initial_part import BLOCK_BYTES, largest
from dflow.tables.shard_vocabulary import BLOCK, ShardVocabulary, first_ledger
from dflow.tables.sharded_variable import ShardedVariable
from dflow.tables.vocabulary import EVICTIONS, FoundIds, Vocabulary, VocabularyCounts
from dflow.tracing.errors import InputError, VariableError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.own_scopes import own_scope
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.state_primitives import gather_p
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.slices import sliced_at
from dflow.tracing.source import as_code, caller
from dflow.tracing.state.context import spread_here
from dflow.tracing.state.resources import Variable, name
from dflow.tracing.wide_ids import IdsAreNoNumbers, WideIds, wide_ids_of

LOGGER = logging.getLogger("dflow")
#: Share of ids without a row of their own that a table with enough room has at most.
SMALL_SHARE = 0.001
#: Least share of free rows that is worth a warning when ids have lost their rows.
MUCH_FREE = 0.1
#: By table, the number of evictions when they were last warned of.
_warned: weakref.WeakKeyDictionary[ShardedVariable, int] = weakref.WeakKeyDictionary()


def grow(table: ShardedVariable, config: Vocabulary, initial: Callable[[], Any], named: str | None) -> None:
    """Give each shard of a new table its ids. `named` is the name that the user gave the table."""
    if spread_here() is not None:
        raise VariableError(
            f"table {table.name!r} has a vocabulary: expected it on parameter tasks or in one process, got a copy or "
            f"a part in each worker",
            "make it within cluster.parameter_servers(), and train it by Async, Sync or Hybrid",
        )
    rows = table.shape[0]
    buckets, each = rows // (config.bucket + 1), config.bucket + 1
    row = sliced_at(initial, AxisSlice(0, 0, 1))
    row_bytes = math.prod(table.shape[1:]) * table.dtype.itemsize
    if largest(row) > max(4 * row_bytes, BLOCK_BYTES // BLOCK):
        raise VariableError(
            f"a table with a vocabulary: expected an initialiser that computes each row by itself, got one that makes "
            f"arrays of {largest(row)} bytes for a row",
            "take one that works element by element, as those of jax.nn.initializers but orthogonal",
        )
    saved = {"ids": (rows, 2), "born": (rows,), "seen": (rows,)}
    saved |= {"uses": (rows,)} if config.evict == "lfu" else {}
    saved |= {"sightings": (rows,)} if config.admit_after > 1 else {}

    def beside(kind: str, shape: tuple[int, ...]) -> ShardedVariable:
        called = None if named is None else f"{named}/{kind}"
        return ShardedVariable(lambda: jnp.zeros(shape, jnp.uint32), near=table, name=called, trainable=False)

    values = jax.jit(jax.vmap(lambda position: row(position)[0]))  # traced once for all shards
    made = {kind: beside(kind, shape) for kind, shape in saved.items()}
    for number, shard in enumerate(table.shards):
        called = None if named is None else f"{named}/ledger/{number}"
        ledger = Variable(first_ledger, name=called, near=shard, trainable=False)
        ledger.is_saved = False
        first = table.layout.bounds[number]
        own = {kind: variable.shards[number] for kind, variable in made.items()}
        shard.hooks = ShardVocabulary(shard, config, (buckets, first // each), values, own, ledger, made["seen"])
    if table.shards[0].home.shares_names and not is_tracing():
        _refuse_other_settings(table, config, f"{named}/vocabulary")


def _refuse_other_settings(table: ShardedVariable, config: Vocabulary, record_name: str) -> None:
    """Raise VariableError if the table's record has other settings: those of the first process that made it."""
    own = [*config.numbers]
    record = Variable(np.array(own, np.uint32), name=record_name, near=table.shards[0], trainable=False)
    record.is_saved = False
    evict, admit_after, bucket, expire_after = first = np.asarray(record.read()).tolist()
    if first != own:
        made = Vocabulary(EVICTIONS[evict], admit_after, bucket, expire_after or None)
        raise VariableError(
            f"vocabulary of table {table.name!r}: expected {made}, with which another process made it, got {config}",
            "give the same settings in all processes, also when the cluster goes on from a snapshot",
        )


def key_of_literals(key: Any) -> Callable[[], Any]:
    """A function that makes a key of `jax.random` of literals, so that tasks make it and it is not sent to them."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(key) if is_typed else key)
    impl = jax.random.key_impl(key) if is_typed else None

    def make() -> Any:
        made = jnp.stack([jnp.uint32(word) for word in words.ravel().tolist()]).reshape(words.shape)
        return made if impl is None else jax.random.wrap_key_data(made, impl=impl)

    return make


def shape_of_ids(ids: Any) -> tuple[int, ...]:
    """The shape of ids in any form."""
    if isinstance(ids, FoundIds):
        return ids.shape
    return np.shape(ids.low if isinstance(ids, WideIds) else ids)


def refuse_found(ids: Any, table: str) -> None:
    """Raise InputError for ids that a table without a vocabulary does not take."""
    if isinstance(ids, WideIds):
        way_out = f"make table {table!r} with vocabulary=dflow.Vocabulary(), or give the numbers of its rows as int32"
        raise IdsAreNoNumbers(ids, f"a lookup in table {table!r}, which has none", way_out)
    if isinstance(ids, FoundIds):
        raise InputError(
            f"table {table!r}: expected integers, got {type(ids).__name__}",
            "make the table with vocabulary=dflow.Vocabulary()",
        )


def find(table: ShardedVariable, ids: Any) -> FoundIds:
    """See `Embedding.find`."""
    _own_ids(table)
    wide = _wide(ids, table.name)
    if is_tracing():
        return _find(table, wide)
    compiled: FoundIds = _compiled(_find, table)(wide)
    return compiled


def _wide(ids: Any, table: str) -> WideIds:
    wide = ids if isinstance(ids, WideIds) else wide_ids_of(ids, f"ids of table {table!r}")
    high, low = jnp.asarray(wide.high), jnp.asarray(wide.low)
    if high.shape != low.shape or {high.dtype, low.dtype} != {jnp.dtype("uint32")}:
        raise InputError(
            f"ids of table {table!r}: expected two arrays of uint32 of one shape, got {high.dtype}{[*high.shape]} and "
            f"{low.dtype}{[*low.shape]}",
            "make them by dflow.wide_ids",
        )
    return WideIds(high, low)


def _find(table: ShardedVariable, ids: WideIds, *, each_once: bool = True) -> FoundIds:
    flat = WideIds(ids.high.reshape(-1), ids.low.reshape(-1))
    shape = np.shape(ids.low)
    if not flat.low.size:
        return FoundIds(table, shape, (), jnp.zeros(0, jnp.int32))
    by_shard = _own_ids(table)
    with own_scope("route", table.name):
        way = route_ids(
            [bound // (by_shard[0].config.bucket + 1) for bound in table.layout.bounds], flat, each_once=each_once
        )
    shards = [
        ids_of.find(name(own, f"{table.name}/{number}/ids"), count)
        for number, (ids_of, own, count) in enumerate(zip(by_shard, way.rows, way.counts, strict=True))
    ]
    return FoundIds(table, shape, tuple(shards), way.positions)


def rows_of(found: FoundIds) -> jax.Array:
    """The rows of ids, an array of their shape and the shape of a row."""
    found.check_whole()
    table = found.table
    shape = (*found.shape, *table.shape[1:])
    if not found.shards:
        return jnp.zeros(shape, table.dtype)
    rows = []
    for shard, looked in zip(table.shards, found.shards, strict=True):
        with colocate_with(shard):
            now = shard.hooks.rows_now(looked)
            rows.append(first_rows(gather_p.bind(now, handle=shard.handle, once=False), looked.count))
    if not all(isinstance(size, int) for size in found.shape):  # JAX takes no rows of an array that may have none
        rows.append(jnp.zeros((1, *table.shape[1:]), table.dtype))
    return jnp.take(jnp.concatenate(rows), found.places, axis=0, mode="clip").reshape(shape)


def looked_up_only(table: ShardedVariable, ids: Any) -> jax.Array:
    """The rows of ids, without a gradient for the table."""
    wide = _wide(ids, table.name)
    if is_tracing():
        return _look_up(table, wide)
    rows: jax.Array = _compiled(_look_up, table)(wide)
    return rows


def _look_up(table: ShardedVariable, ids: WideIds) -> jax.Array:
    rows: jax.Array = _untrained(rows_of(_find(table, ids, each_once=False)), table.name)
    return rows


def counts(table: ShardedVariable) -> VocabularyCounts:
    """See `Embedding.counts`."""
    found = VocabularyCounts(*map(sum, zip(*(ids.counts() for ids in _own_ids(table)), strict=True)))
    if found.evicted >= 2 * _warned.get(table, 0) > 0 or (found.evicted and table not in _warned):
        _warn_of_full_buckets(table, found.evicted)
    return found


def _warn_of_full_buckets(table: ShardedVariable, evicted: int) -> None:
    """Log a warning if ids lose their rows although many rows are free: the first time, and when twice as many have."""
    shards = _own_ids(table)
    used, bucket = sum(int(ids.used_rows()) for ids in shards), shards[0].config.bucket
    rows, needed = sum(ids.capacity for ids in shards), rows_for(used, bucket)
    free = 1 - used / rows
    if free < MUCH_FREE or needed <= rows:
        return
    _warned[table] = evicted
    LOGGER.warning(
        "table %r: %d times an id has lost its row to another one, though %.0f%% of the rows are free: an id has its "
        "row in one bucket of %d, and some buckets are full\n  give it rows=%d for %d ids, or Vocabulary(bucket=%d)",
        *(table.name, evicted, 100 * free, bucket, needed, used, 4 * bucket),
    )


def share_without_row(load: float, bucket: int = 32) -> float:
    """Return the expected share of ids that have no row at a time, and that evict another id when they are used.

    Ids fall into buckets at random: the number of ids of one has a Poisson distribution, whose mean is the bucket's
    size times the load, the number of ids divided by that of rows. So some buckets are full while rows are free.
    """
    mean = load * bucket
    if mean <= 0:
        return 0.0
    last = int(mean + 12 * math.sqrt(mean) + bucket + 12)
    beyond = sum(
        (count - bucket) * math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        for count in range(bucket + 1, last)
    )
    return beyond / mean


def rows_for(ids: int, bucket: int = 32, share: float = SMALL_SHARE) -> int:
    """Return the number of rows, rounded up to two digits, at which at most `share` of `ids` ids have no row."""
    load = max((step / 100 for step in range(1, 100) if share_without_row(step / 100, bucket) <= share), default=0.01)
    rows = ids / load
    unit: int = 10 ** max(0, math.floor(math.log10(max(rows, 1))) - 1)
    return int(math.ceil(rows / unit) * unit)


def _compiled(function: Callable[[ShardedVariable, WideIds], Any], table: ShardedVariable) -> Callable[[WideIds], Any]:
    """Return the compiled form of a function of the table, made once."""
    made: dict[Any, Callable[[WideIds], Any]] = table.__dict__.setdefault("_compiled", {})
    if function not in made:
        made[function] = jit(lambda ids: function(table, ids))
    return made[function]


def vocabulary_of(table: ShardedVariable) -> Vocabulary | None:
    """Return the settings of the table's vocabulary; None if it has none."""
    ids = getattr(table.shards[0], "hooks", None)
    return ids.config if isinstance(ids, ShardVocabulary) else None


def _own_ids(table: ShardedVariable) -> list[ShardVocabulary]:
    if vocabulary_of(table) is None:
        raise VariableError(
            f"table {table.name!r} has no vocabulary", "make it with vocabulary=dflow.Vocabulary()", at=caller()
        )
    return [shard.hooks for shard in table.shards]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _untrained(rows: Any, table: str) -> Any:
    """Return `rows`. Their derivative is an error."""
    return rows


@_untrained.defjvp
def _untrained_jvp(table: str, primals: Any, tangents: Any) -> Any:
    raise VariableError(
        f"the gradient of table {table!r}: expected a lookup of found ids, got one of ids, whose rows another step may "
        f"give to other ids",
        f"find them before the loss, found = {as_code(table)}.find(ids), look up {as_code(table)}(found), and call "
        f"optimizer.apply(gradients, found=found)",
    )
