"""A set of whole numbers that come in ranges, such as the numbers of the steps that are done."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IndexSet:
    """Whole numbers, kept as ranges that neither overlap nor touch. Each operation searches the ranges by bisection."""

    def __init__(self, parts: Iterable[range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for part in parts:
            self.add(part)

    @staticmethod
    def of(pairs: Iterable[Iterable[int]]) -> IndexSet:
        """Return the set whose `pairs` these are."""
        return IndexSet(range(*pair) for pair in pairs)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return sum(map(len, self.ranges()))

    def ranges(self) -> Iterator[range]:
        """Return the ranges, in order."""
        return map(range, self._starts, self._stops)

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the first number of each range and the one after its last, to be written."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, numbers: range) -> None:
        """Add consecutive numbers."""
        if not numbers:
            return
        first, last = bisect_left(self._stops, numbers.start), bisect_right(self._starts, numbers.stop)
        start, stop = numbers.start, numbers.stop
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def discard(self, numbers: range) -> None:
        """Remove consecutive numbers, as far as they are there."""
        first, last = bisect_right(self._stops, numbers.start), bisect_left(self._starts, numbers.stop)
        if not numbers or first >= last:
            return
        start, stop = self._starts[first], self._stops[last - 1]
        rest = [part for part in (range(start, numbers.start), range(numbers.stop, stop)) if part]
        self._starts[first:last], self._stops[first:last] = [part.start for part in rest], [part.stop for part in rest]

    def take(self, count: int) -> range:
        """Remove and return the first consecutive numbers, at most `count`. The set must not be empty."""
        start, stop = self._starts[0], self._stops[0]
        if stop - start <= count:
            del self._starts[0], self._stops[0]
            return range(start, stop)
        self._starts[0] += count
        return range(start, start + count)
