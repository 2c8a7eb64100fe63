from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflow.lowering.queues.mailbox import Mailbox

DEADLINE_S = 60.0


def test_what_an_item_posts_is_handled_after_it() -> None:
    log: list[str] = []

    def handle(items: deque[int]) -> None:
        item = items.popleft()
        log.append(f"begin {item}")
        if item < 2:
            mailbox.post(item + 1)
        log.append(f"end {item}")

    mailbox = Mailbox(handle)
    mailbox.post(0)
    assert log == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]


def test_an_item_of_another_thread_is_handled_before_its_post_returns_and_with_those_that_wait() -> None:
    entered, go_on = threading.Event(), threading.Event()
    taken: list[list[int]] = []

    def handle(items: deque[int]) -> None:
        taken.append([items.popleft() for _ in range(len(items))])
        entered.set()
        assert go_on.wait(DEADLINE_S)

    mailbox = Mailbox(handle)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(mailbox.post, 0)
        assert entered.wait(DEADLINE_S)
        others = [pool.submit(mailbox.post, number) for number in (1, 2)]
        while len(mailbox._items) < 2:
            assert not first.done()
        assert not any(other.done() for other in others)
        go_on.set()
        for other in (first, *others):
            other.result(DEADLINE_S)
    assert taken[0] == [0]
    assert sorted(itertools.chain(*taken[1:])) == [1, 2]


def test_an_error_does_not_keep_the_items_after_it() -> None:
    handled: list[int] = []

    def handle(items: deque[int]) -> None:
        item = items.popleft()
        if item == 0:
            mailbox.post(1)
            mailbox.post(2)
            raise ValueError("item 0 is broken")
        handled.append(item)

    mailbox = Mailbox(handle)
    with pytest.raises(ValueError, match="item 0 is broken"):
        mailbox.post(0)
    mailbox.post(3)
    assert handled == [1, 2, 3]
