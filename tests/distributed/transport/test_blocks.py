"""Blocks of a shared memory, against a model that marks every page."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.shared_memory import GRAIN_BYTES, Blocks
from tests.effort import examples

PAGES = 16


@settings(max_examples=examples(100))
@given(st.lists(st.one_of(st.integers(0, 6 * GRAIN_BYTES), st.sampled_from(["oldest", "newest"])), max_size=40))
def test_blocks_are_the_first_gap_that_fits(actions: list[int | str]) -> None:
    blocks = Blocks(PAGES * GRAIN_BYTES + 100)
    used = [False] * PAGES
    taken: list[tuple[int, int]] = []
    for action in actions:
        if isinstance(action, int):
            pages = max(-(-action // GRAIN_BYTES), 1)
            fits = [at for at in range(PAGES - pages + 1) if not any(used[at : at + pages])]
            offset = blocks.take(action)
            assert offset == (fits[0] * GRAIN_BYTES if fits else None)
            if offset is not None:
                taken.append((offset // GRAIN_BYTES, pages))
                used[fits[0] : fits[0] + pages] = [True] * pages
        elif taken:
            at, pages = taken.pop(0 if action == "oldest" else -1)
            blocks.give_back(at * GRAIN_BYTES)
            used[at : at + pages] = [False] * pages
