from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dflow.distributed.steps.deadlines import Deadlines
from tests.manual_clock import ManualClock

TIMEOUT_S = 10.0


class Waits:
    """Waits with deadlines, by name; one that expires ends, unless its name is "kept"."""

    def __init__(self, on_expiry: Callable[[str], None] = lambda wait: None) -> None:
        self.clock, self.lock = ManualClock(), threading.Lock()
        self.pending: dict[str, float] = {}
        self.expired: list[str] = []
        self.deadlines = Deadlines(TIMEOUT_S, self.all, self.expire, self.clock, self.lock)
        self.on_expiry = on_expiry

    def begin(self, wait: str) -> None:
        with self.lock:
            self.pending[wait] = self.deadlines.begin()

    def overdue(self) -> int:
        with self.lock:
            return self.deadlines.overdue()

    def all(self) -> list[tuple[float, str]]:
        assert self.lock.locked()
        return [(ends_s, wait) for wait, ends_s in self.pending.items()]

    def expire(self, wait: str) -> None:
        assert not self.lock.locked()
        self.on_expiry(wait)
        self.expired.append(wait)
        if wait != "kept":
            del self.pending[wait]


def test_each_wait_expires_once_after_its_timeout_the_oldest_first() -> None:
    waits = Waits()
    for wait in "abc":
        waits.begin(wait)
        waits.clock.advance(1)
    waits.clock.advance(6.9)
    assert waits.expired == []
    waits.clock.advance(0.1)
    assert waits.expired == ["a"]
    waits.clock.advance(1)
    assert waits.expired == ["a", "b"]
    waits.clock.advance(100)
    assert waits.expired == ["a", "b", "c"]
    waits.begin("d")
    waits.clock.advance(TIMEOUT_S)
    assert waits.expired == ["a", "b", "c", "d"]


def test_a_wait_whose_end_fails_leaves_the_later_ones_their_deadlines(caplog: pytest.LogCaptureFixture) -> None:
    def fail(wait: str) -> None:
        if wait == "bad":
            raise RuntimeError("a callback of the user's")

    waits = Waits(fail)
    for wait in ("bad", "good"):
        waits.begin(wait)
    waits.clock.advance(TIMEOUT_S)
    assert waits.expired == ["good"]
    assert "a callback of the user's" in caplog.text


def test_a_wait_that_expires_and_does_not_end_expires_again() -> None:
    waits = Waits()
    waits.begin("kept")
    waits.clock.advance(TIMEOUT_S - 1)
    assert waits.overdue() == 0
    waits.clock.advance(TIMEOUT_S)
    assert waits.expired == ["kept"]
    assert waits.overdue() == 1
    waits.clock.advance(TIMEOUT_S)
    assert waits.expired == ["kept", "kept"]
    waits.clock.advance(TIMEOUT_S)
    without_timer = Waits()
    without_timer.pending["unknown"] = 1.0
    assert without_timer.overdue() == 1
