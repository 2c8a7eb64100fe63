from __future__ import annotations

import queue

import pytest

from dflow.distributed.steps.deadlines import Deadlines
from dflow.lowering.queues.timers import Timers

DEADLINE_S = 30.0


def test_what_is_added_expires_once_and_in_order() -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    deadlines = Deadlines(0.01, expired.put, timers)
    for key in "abc":
        deadlines.add(key)
    assert [expired.get(timeout=DEADLINE_S) for _ in range(3)] == ["a", "b", "c"]
    deadlines.add("d")
    assert expired.get(timeout=DEADLINE_S) == "d"
    assert expired.empty()
    timers.close()


def test_what_is_discarded_does_not_expire() -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    deadlines = Deadlines(0.05, expired.put, timers)
    deadlines.add("discarded")
    deadlines.discard("discarded")
    deadlines.discard("unknown")
    deadlines.add("kept")
    assert expired.get(timeout=DEADLINE_S) == "kept"
    timers.close()


def test_a_wait_whose_end_fails_leaves_the_later_ones_their_deadlines(caplog: pytest.LogCaptureFixture) -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()

    def expire(key: str) -> None:
        if key == "bad":
            raise RuntimeError("a callback of the user's")
        expired.put(key)

    timers = Timers()
    deadlines = Deadlines(0.01, expire, timers)
    deadlines.add("bad")
    deadlines.add("good")
    assert expired.get(timeout=DEADLINE_S) == "good"
    assert "a callback of the user's" in caplog.text
    timers.close()
