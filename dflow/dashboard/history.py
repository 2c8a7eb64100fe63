"""Curves of a run, kept in bounded memory however long it runs.

A series has at most `MOST_POINTS` points. When it is full, neighbours are joined, so that each point stands for an
interval of twice the length; a point has the last value and the extremes of its interval, so no spike is lost.
Invariant: at most `MOST_SERIES` series exist; the values of others are counted and dropped.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

MOST_POINTS = 400
MOST_SERIES = 200
#: Most characters of a series' name.
LONGEST_NAME = 120
#: Beginnings of the names of series that are no metrics of the user, and of the prefix of metrics that begin so.
RATES = ("steps/s", "bytes/s", "processor", "missed", "queue ", "metric ")


class SeriesName(NamedTuple):
    """A curve: the short name of its task, or empty for one of the cluster; the quantity; its unit."""

    task: str
    name: str
    unit: str = ""

    @property
    def id(self) -> str:
        """The name of the series for pages. A metric, which has no unit, has a prefix if a rate has its name."""
        name = f"metric {self.name}" if not self.unit and self.name.startswith(RATES) else self.name
        return f"{self.task}/{name}" if self.task else name


class Series:
    """One curve. Times are in s and do not decrease; `step` is the number of steps done by then."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        #: Values that were added per point, and that the last point stands for.
        self._per_point, self._in_last = 1, 0
        self._at_s, self._step = array("d"), array("q")
        self._value, self._low, self._high = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._at_s)

    def add(self, at_s: float, step: int, value: float) -> None:
        """Append a value, which may be not finite."""
        if 0 < self._in_last < self._per_point:
            self._at_s[-1], self._step[-1], self._value[-1] = at_s, step, value
            self._low[-1], self._high[-1] = _least(self._low[-1], value), _greatest(self._high[-1], value)
            self._in_last += 1
            return
        if len(self) == self._most:
            self._join_neighbours()
            if self._in_last < self._per_point:
                self.add(at_s, step, value)
                return
        for column, new in zip(self._columns(), (at_s, step, value, value, value), strict=True):
            column.append(new)
        self._in_last = 1

    def json(self) -> dict[str, list[float | None]]:
        """Return the points as columns; a value that is not finite is None."""
        names = ("at_s", "step", "value", "low", "high")
        return {name: [*map(finite, column)] for name, column in zip(names, self._columns(), strict=True)}

    def _columns(self) -> tuple[array[Any], ...]:
        return self._at_s, self._step, self._value, self._low, self._high

    def _join_neighbours(self) -> None:
        """Halve the number of points; an odd last one stays, as the beginning of a longer interval."""
        pairs = range(0, len(self) - 1, 2)
        low = [_least(self._low[index], self._low[index + 1]) for index in pairs]
        high = [_greatest(self._high[index], self._high[index + 1]) for index in pairs]
        is_odd = len(self) % 2
        for column, joined in ((self._low, low), (self._high, high)):
            column[:] = array("d", joined + ([column[-1]] if is_odd else []))
        for column in self._columns()[:3]:
            column[:] = column[1::2] + (column[-1:] if is_odd else column[:0])
        self._in_last = self._per_point if is_odd else 2 * self._per_point
        self._per_point *= 2


class History:
    """The series of a run, by name."""

    def __init__(self, most_points: int = MOST_POINTS, most_series: int = MOST_SERIES) -> None:
        self._most_points, self._most_series = most_points, most_series
        self._series: dict[SeriesName, Series] = {}
        #: Names that were dropped, up to as many again.
        self._dropped: set[SeriesName] = set()

    def add(self, at_s: float, step: int, values: Mapping[SeriesName, float]) -> dict[str, float | None]:
        """Append a point to each series, and return the kept points, by id."""
        kept: dict[str, float | None] = {}
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= self._most_series or len(name.name) > LONGEST_NAME:
                    if len(self._dropped) < self._most_series:
                        self._dropped.add(name)
                    continue
                series = self._series[name] = Series(self._most_points)
            series.add(at_s, step, value)
            kept[name.id] = finite(value)
        return kept

    def json(self, names: Collection[str] = ()) -> dict[str, Any]:
        """Return the series as JSON data; only those of these quantities, unless `names` is empty."""
        shown = [
            {"id": name.id, "task": name.task, "name": name.name, "unit": name.unit, **series.json()}
            for name, series in self._series.items()
            if not names or name.name in names
        ]
        return {"series": shown, "left_out": len(self._dropped)}


def finite(value: float) -> float | None:
    """Return the value, or None if JSON cannot have it."""
    return value if math.isfinite(value) else None


def _least(first: float, second: float) -> float:
    """Return the smaller one; one that is not finite does not count if the other is."""
    return min((one for one in (first, second) if math.isfinite(one)), default=second)


def _greatest(first: float, second: float) -> float:
    return max((one for one in (first, second) if math.isfinite(one)), default=second)
