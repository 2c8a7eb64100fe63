"""Rows of tables at tasks for the calls of a served version: from a cache of this process, or asked of the tasks.

A function is called in two programs. The first gives the numbers of the rows that it looks up, or ids; the rows that
the cache lacks are asked of the tasks, each once; the second program takes the rows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflow.distributed.task.row_reads import rows_at
from dflow.exporting.loaded_function import LoadedFunction
from dflow.serving.rows.row_cache import RowCache
from dflow.serving.rows.task_rows import TableShard, TaskRows
from dflow.state_backends import LOCAL
from dflow.tracing.state.resources import Variable

#: Most rows of a table that are kept while it is to stay as it is.
_MOST_STILL = 1 << 16


@dataclass
class TableCounts:
    """Numbers of distinct rows of calls: found in the cache, and asked of the tasks."""

    hits: int = 0
    misses: int = 0


class _Wanted(NamedTuple):
    """What lookups in one shard ask for.

    keys       i64[k], each once: numbers of rows in the table, or ids
    asked      the same as its task is asked for them
    positions  of each element of the lookups, the position among these
    """

    keys: npt.NDArray[np.int64]
    asked: npt.NDArray[Any]
    positions: npt.NDArray[np.intp]


class TableRows:
    """The rows of some tables; thread-safe.

    shards      tables and shards of tables
    tasks       reads rows
    here        the variables of shards that are in this process, since a function also uses them otherwise, by name
    cache_rows  most rows of each table that are kept here
    max_age_s   longest time that a row is taken from here after it was asked for
    clock       gives the time in s
    """

    def __init__(
        self,
        shards: Collection[TableShard],
        tasks: TaskRows,
        here: Mapping[str, Variable],
        cache_rows: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self.tasks, self._clock = {shard.name: shard for shard in shards}, tasks, clock
        self._here = {name: variable for name, variable in here.items() if name in self._shards}
        self._caches = self._new_caches(cache_rows, max_age_s)
        #: By table.
        self.counts = {table: TableCounts() for table in self._caches}
        self._lock = Lock()
        self._changes = tasks.changes

    @property
    def held(self) -> dict[str, int]:
        """The number of rows in the cache, by table."""
        return {table: len(cache) for table, cache in self._caches.items()}

    @property
    def oldest_s(self) -> dict[str, float]:
        """The age of the oldest row that may be taken from the cache, in s, by table."""
        now = self._clock()
        return {table: cache.oldest_s(now) for table, cache in self._caches.items()}

    @contextmanager
    def held_still(self) -> Iterator[None]:
        """Within the context, keep each row as it was first read, though training may change it."""
        before, self._caches = self._caches, self._new_caches(_MOST_STILL, float("inf"))
        try:
            yield
        finally:
            self._caches = before

    def find(self, names: Sequence[str], numbers: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Return the rows of lookups: of each the variable, and integers of any shape, or ids, u32[..., 2].

        A number past an end stands for the row at that end; in a shard for none, as an id of another shard, and any
        values are returned. Raises TaskLost.
        """
        lookups: dict[str, list[int]] = defaultdict(list)
        for lookup, name in enumerate(names):
            lookups[name].append(lookup)
        given = [np.asarray(each) for each in numbers]
        ends = {name: 1 if self._shards[name].id_rows is None else 2 for name in lookups}
        shapes = [one.shape if ends[name] == 1 else one.shape[:-1] for name, one in zip(names, given, strict=True)]
        wanted = {}
        for name, own in lookups.items():
            flat = [given[lookup].reshape((-1, 2) if ends[name] == 2 else (-1,)) for lookup in own]
            wanted[name] = _wanted(self._shards[name], np.concatenate(flat))
        rows = self._rows({name: one for name, one in wanted.items() if name not in self._here})
        for name in wanted.keys() & self._here:
            rows[name] = _rows_here(self._here[name], wanted[name].asked)
        found: dict[int, npt.NDArray[Any]] = {}
        for name, own in lookups.items():
            some = rows[name] if len(rows[name]) else np.zeros((1, *rows[name].shape[1:]), rows[name].dtype)
            cuts = np.cumsum([int(np.prod(shapes[lookup])) for lookup in own])
            for lookup, part in zip(own, np.split(wanted[name].positions, cuts[:-1]), strict=True):
                found[lookup] = some[part].reshape(*shapes[lookup], *some.shape[1:])
        return [found[lookup] for lookup in range(len(names))]

    def _rows(self, wanted: Mapping[str, _Wanted]) -> dict[str, npt.NDArray[Any]]:
        """Return the rows that the lookups need, by variable."""
        caches, now, changes = self._caches, self._clock(), self._now_valid()
        found, missing = {}, {}
        for name, one in wanted.items():
            found[name], is_here = caches[self._shards[name].table].find(one.keys, now)
            missing[name] = ~is_here
        asked = {self._shards[name]: one.asked[missing[name]] for name, one in wanted.items() if missing[name].any()}
        new = self.tasks.read(asked) if asked else {}
        with self._lock:
            is_valid = self.tasks.changes == changes
            for shard, rows in new.items():
                found[shard.name][missing[shard.name]] = rows
                if is_valid:
                    caches[shard.table].add(wanted[shard.name].keys[missing[shard.name]], rows, now)
            for name, mask in missing.items():
                counts = self.counts[self._shards[name].table]
                counts.hits += int((~mask).sum())
                counts.misses += int(mask.sum())
        return found

    def _now_valid(self) -> int:
        """Drop rows that are those of the tasks no more; return the number of changes until now."""
        changes = self.tasks.changes
        if changes != self._changes:
            with self._lock:
                for cache in self._caches.values():
                    cache.clear()
                self._changes = changes
        return changes

    def _new_caches(self, rows: int, max_age_s: float) -> dict[str, RowCache]:
        caches: dict[str, RowCache] = {}
        for shard in (shard for name, shard in self._shards.items() if name not in self._here):
            cache = RowCache(min(rows, shard.rows_of_table), shard.type.shape[1:], shard.type.dtype, max_age_s)
            caches.setdefault(shard.table, cache)
        return caches


def _rows_here(variable: Variable, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return LOCAL.store.look([variable.key], lambda values: rows_at(values[0], numbers))


def _wanted(shard: TableShard, flat: npt.NDArray[Any]) -> _Wanted:
    """Return what lookups of numbers, i32[n], or of ids, u32[n, 2], ask a shard for."""
    count = shard.type.shape[0]
    if shard.id_rows is not None:
        is_here = shard.id_rows.has(flat, count)
        keys = ((flat[:, 0].astype(np.uint64) << np.uint64(32)) | flat[:, 1]).view(np.int64)
    elif shard.part is None:
        keys, is_here = flat.clip(0, count - 1).astype(np.int64), np.ones(len(flat), bool)
    else:
        keys, is_here = flat.astype(np.int64), (flat >= 0) & (flat < count)
    unique, inverse = np.unique(keys[is_here], return_inverse=True)
    positions = np.zeros(len(keys), np.intp)
    positions[is_here] = inverse.reshape(-1)
    if shard.id_rows is not None:
        bits = unique.view(np.uint64)
        pairs = np.stack([(bits >> np.uint64(32)).astype(np.uint32), bits.astype(np.uint32)], 1)
        return _Wanted(unique, pairs, positions)
    first, step = shard.numbering
    return _Wanted(first + step * unique, unique.astype(np.int32), positions)


class FetchingFunction:
    """A function of an export whose rows come from `rows`; called like the function itself, outside of traced code.

    of_ids  whether the tasks find the rows of ids
    """

    def __init__(self, function: LoadedFunction, rows: TableRows, *, of_ids: bool) -> None:
        assert function.lookups is not None
        self._tables, self._rows = function.lookups.tables, rows
        self._numbers, self._results = function.numbers(of_ids=of_ids), function.results()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises as the function does, and TaskLost."""
        rows = self._rows.find(self._tables, self._numbers(*args, **kwargs))
        return self._results(rows, *args, **kwargs)

    def clear_cache(self) -> None:
        """Free the compiled programs."""
        self._numbers.clear_cache()
        self._results.clear_cache()
