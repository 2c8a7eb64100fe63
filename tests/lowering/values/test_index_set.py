"""Sets of numbers in ranges, beside Python's sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.values.index_set import IndexSet
from tests.effort import examples

RANGES = st.builds(lambda start, count: range(start, start + count), st.integers(0, 60), st.integers(0, 9))


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.booleans(), RANGES) | st.integers(1, 12), max_size=30))
def test_a_set_has_the_numbers_added_and_not_removed(operations: list[tuple[bool, range] | int]) -> None:
    found, expected = IndexSet(), set[int]()
    for operation in operations:
        if isinstance(operation, tuple):
            is_added, numbers = operation
            (found.add if is_added else found.discard)(numbers)
            expected = expected | {*numbers} if is_added else expected - {*numbers}
        elif expected:
            first = min(expected)
            taken = found.take(operation)
            run = next(n for n in range(first, first + operation + 1) if n not in expected or n == first + operation)
            assert taken == range(first, run)
            expected -= {*taken}
        ranges = list(found.ranges())
        assert [number for part in ranges for number in part] == sorted(expected)
        assert all(one.stop < other.start for one, other in pairwise(ranges))
        assert (len(found), bool(found)) == (len(expected), bool(expected))
        assert [number in found for number in range(-1, 75)] == [number in expected for number in range(-1, 75)]
