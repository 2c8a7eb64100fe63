"""The order of rows of files: each row once an epoch, parts that share few blocks, and windows of random order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.input.block_cache import BlockCache
from dflow.input.block_order import BlockOrder
from tests.effort import examples

pytestmark = pytest.mark.once


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 17), st.integers(0, 60), st.integers(1, 4))
@settings(max_examples=examples(200), deadline=None)
def test_each_row_is_in_one_batch_and_the_blocks_of_its_window_are_announced(
    rows: list[int], size: int, window: int, parts: int
) -> None:
    announced: list[int] = []
    order = BlockOrder(rows, size, window, parts, (1, 2), lambda blocks, after: announced.extend(blocks))
    first = np.concatenate([[0], np.cumsum(rows)])
    used: list[set[int]] = [set() for _ in range(parts)]
    found = {}
    numbers = range(-(-len(order) // size))
    for number in np.random.default_rng(0).permutation(numbers).tolist():  # in any order
        announced.clear()
        found[number] = order[number * size : (number + 1) * size]
        blocks = {*(np.searchsorted(first, found[number], "right") - 1).tolist()}
        assert blocks <= {*announced}
        used[number % parts] |= blocks
    together = np.concatenate([found[number] for number in numbers])
    np.testing.assert_array_equal(np.sort(together), np.arange(sum(rows)))
    assert [len(found[number]) for number in numbers][:-1] == [size] * (len(numbers) - 1)
    assert sum(map(len, used)) <= len(rows) + parts - 1
    if not window and parts == 1:
        np.testing.assert_array_equal(together, np.arange(sum(rows)))


def test_the_order_is_random_within_a_window_and_of_blocks_and_follows_from_the_seed() -> None:
    def drawn(*seed: int) -> list[int]:
        order = BlockOrder([10] * 6, 5, 20, 1, seed, lambda *_: None)
        return [int(row) for start in range(0, 60, 5) for row in order[start : start + 5]]

    assert drawn(0, 0) == drawn(0, 0) != drawn(0, 1)
    windows = [{row // 10 for row in drawn(0, 0)[start : start + 20]} for start in range(0, 60, 20)]
    assert [len(blocks) for blocks in windows] == [2, 2, 2]
    assert windows != [{0, 1}, {2, 3}, {4, 5}]


def test_a_read_that_has_timed_out_says_so_and_is_done_again() -> None:
    results = [TimeoutError("of the file system"), 7]

    def read(block: int) -> int:
        found = results.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    cache = BlockCache(read, 1)
    with pytest.raises(TimeoutError, match="of the file system"):
        cache.get(0)
    assert cache.get(0) == 7
