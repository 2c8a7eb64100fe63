"""Rows of tables at tasks for the calls of a served version: from a cache of this process, or asked of the tasks.

A function is called in two programs. The first gives the numbers of the rows that it looks up; the rows that the cache
lacks are fetched in one step of the cluster, each once; the second program takes the rows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from dflow.calls.function import jit
from dflow.exporting.loaded_function import LoadedFunction
from dflow.exporting.row_lookups import first_rows_at
from dflow.serving.row_cache import RowCache
from dflow.tracing.errors import TaskLost
from dflow.tracing.state.resources import Variable

#: Numbers of rows that are asked for in one step: the least that is enough, so that few programs are compiled.
_ROOMS = tuple(64 << 2 * power for power in range(8))


@dataclass
class TableCounts:
    """Numbers of distinct rows of calls: found in the cache, and asked of the tasks."""

    hits: int = 0
    misses: int = 0


class TableRows:
    """The rows of some tables; thread-safe.

    tables      the variables by name, each of them a table or a shard of one
    cache_rows  most rows of each table that are kept here
    max_age_s   longest time that a row is taken from here after it was asked for
    clock       gives the time in s
    """

    def __init__(
        self,
        tables: Mapping[str, Variable],
        cache_rows: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tables, self._clock = dict(tables), clock
        #: By variable: its table, and the number there of its first row and of the next one after each.
        self._places = {name: _place(name, variable) for name, variable in tables.items()}
        self._caches: dict[str, RowCache] = {}
        for name, variable in tables.items():
            rows = variable.shape[0] if variable.part is None else variable.part.whole[0]
            cache = RowCache(min(cache_rows, rows), variable.shape[1:], variable.dtype, max_age_s)
            self._caches.setdefault(self._places[name][0], cache)
        #: By table.
        self.counts = {table: TableCounts() for table in self._caches}
        self._count_lock = Lock()
        self._fetch = jit(self._fetched)
        #: Whether a task has lost rows of the tables, so that they must be loaded again.
        self.is_lost = False

    @property
    def held(self) -> dict[str, int]:
        """The number of rows in the cache, by table."""
        return {table: len(cache) for table, cache in self._caches.items()}

    @property
    def oldest_s(self) -> dict[str, float]:
        """The age of the oldest row that may be taken from the cache, in s, by table."""
        now = self._clock()
        return {table: cache.oldest_s(now) for table, cache in self._caches.items()}

    def find(self, names: Sequence[str], numbers: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Return the rows of lookups: of each the variable, and integers of any shape.

        A number past an end stands for the row at that end; in a shard for none, and any values are returned.
        Raises TaskLost, and DeadlineExceeded of a step.
        """
        lookups: dict[str, list[int]] = defaultdict(list)
        for lookup, name in enumerate(names):
            lookups[name].append(lookup)
        given = [np.asarray(each) for each in numbers]
        asked, inverse = {}, {}
        for name, own in lookups.items():
            flat = np.concatenate([given[lookup].reshape(-1) for lookup in own])
            asked[name], inverse[name] = np.unique(self._inside(name, flat), return_inverse=True)
        rows = self._rows({name: ids[ids >= 0] for name, ids in asked.items()})
        found: dict[int, npt.NDArray[Any]] = {}
        for name, own in lookups.items():
            some = rows[name] if len(rows[name]) else np.zeros((1, *rows[name].shape[1:]), rows[name].dtype)
            # The number of none comes first, and has the first row.
            positions = np.maximum(inverse[name].reshape(-1) - (len(asked[name]) - len(rows[name])), 0)
            ends = np.cumsum([given[lookup].size for lookup in own])
            for lookup, part in zip(own, np.split(positions, ends[:-1]), strict=True):
                found[lookup] = some[part].reshape(*given[lookup].shape, *some.shape[1:])
        return [found[lookup] for lookup in range(len(names))]

    def _inside(self, name: str, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return numbers of rows, and -1 for none."""
        last = self._tables[name].shape[0] - 1
        if self._tables[name].part is None:
            inside: npt.NDArray[Any] = numbers.clip(0, last)
        else:
            inside = np.where((numbers >= 0) & (numbers <= last), numbers, -1)
        return inside.astype(np.int32)

    def _rows(self, asked: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of numbers by variable; none is twice."""
        now, found, missing, ids, new = self._clock(), {}, {}, {}, {}
        for name, numbers in asked.items():
            table, first, step = self._places[name]
            ids[name] = first + step * numbers.astype(np.int64)
            found[name], is_here = self._caches[table].find(ids[name], now)
            missing[name] = ~is_here
        if any(mask.any() for mask in missing.values()):
            try:
                new = self._fetch_rows({name: asked[name][mask] for name, mask in missing.items()})
            except TaskLost:
                self.is_lost = True
                raise
        for name, rows in new.items():
            found[name][missing[name]] = rows
            self._caches[self._places[name][0]].add(ids[name][missing[name]], rows, now)
        with self._count_lock:
            for name, mask in missing.items():
                counts = self.counts[self._places[name][0]]
                counts.hits += int((~mask).sum())
                counts.misses += int(mask.sum())
        return found

    def _fetch_rows(self, asked: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return rows of the tasks, by one step for all variables; of more than there is room for, by several.

        A variable without a missing row takes part too, so that a function has one program for each room.
        """
        count = max(map(len, asked.values()))
        room = next((room for room in _ROOMS if room >= count), _ROOMS[-1])
        pieces: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in asked}
        for first in range(0, count, room):
            part = {name: ids[first : first + room] for name, ids in asked.items()}
            found = self._fetch({name: (_padded(ids, room), np.int32(len(ids))) for name, ids in part.items()})
            for name, rows in found.items():
                pieces[name].append(np.asarray(rows)[: len(part[name])])
        return {name: np.concatenate(several) for name, several in pieces.items()}

    def _fetched(self, asked: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        return {name: first_rows_at(self._tables[name], *each) for name, each in asked.items()}


def _place(name: str, variable: Variable) -> tuple[str, int, int]:
    """Return the name of the table of a variable, and the number there of its first row and the step to the next."""
    if variable.part is None or variable.part.indices.axis != 0:
        return name, 0, 1
    return name.rpartition("/")[0], variable.part.indices.start, variable.part.indices.step


def _padded(ids: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    return np.concatenate([ids, np.zeros(room - len(ids), np.int32)])


class FetchingFunction:
    """A function of an export whose rows come from `rows`; called like the function itself, outside of traced code."""

    def __init__(self, function: LoadedFunction, rows: TableRows) -> None:
        assert function.lookups is not None
        self._tables, self._rows = function.lookups.tables, rows
        self._numbers, self._results = function.numbers(), function.results()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises as the function does, and TaskLost, DeadlineExceeded or another DflowError of a task."""
        rows = self._rows.find(self._tables, self._numbers(*args, **kwargs))
        return self._results(rows, *args, **kwargs)

    def clear_cache(self) -> None:
        """Free the compiled programs."""
        self._numbers.clear_cache()
        self._results.clear_cache()
