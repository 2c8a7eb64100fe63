"""The order of waits for compilations, and deadlines of waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

import pytest

from dflow.distributed.steps import fair_semaphore
from dflow.distributed.steps.deadlines import Deadlines
from dflow.distributed.steps.fair_semaphore import FairSemaphore
from dflow.tracing.errors import DeadlineExceeded, TaskLost
from tests.distributed.waiting import DEADLINE_S, until
from tests.manual_clock import ManualClock

ONE, TWO = "/job:worker/task:0", "/job:worker/task:1"


class Compiling:
    """Threads that hold the semaphore until they may end."""

    def __init__(self, limit: int) -> None:
        self.semaphore = FairSemaphore(limit)
        self.began: list[str] = []
        self.may_end = threading.Semaphore(0)
        self.threads = ThreadPoolExecutor(64)

    def ask(self, task: str, name: str) -> Future[None]:
        """Acquire the semaphore on a thread; return when that has happened or waits."""
        known, waiting = len(self.began), self.waiting
        asked = self.threads.submit(self._compile, task, name)
        until(lambda: len(self.began) > known or self.waiting > waiting)
        return asked

    @property
    def waiting(self) -> int:
        return sum(map(len, self.semaphore._waiting.values()))

    def _compile(self, task: str, name: str) -> None:
        with self.semaphore.held_for(task):
            self.began.append(name)
            assert self.may_end.acquire(timeout=DEADLINE_S)

    def end_one(self) -> None:
        """End a thread, and wait until the next one holds the semaphore."""
        known = len(self.began)
        self.may_end.release()
        until(lambda: len(self.began) > known)


@pytest.fixture
def compiling() -> Iterator[Compiling]:
    made = Compiling(2)
    yield made
    made.may_end.release(64)
    made.threads.shutdown()


def test_tasks_acquire_it_one_after_another_however_many_waits_each_has(compiling: Compiling) -> None:
    for number in range(20):
        compiling.ask(ONE, f"one {number}")
    assert compiling.began == ["one 0", "one 1"]
    for number in range(2):
        compiling.ask(TWO, f"two {number}")
    for _ in range(5):
        compiling.end_one()
    assert compiling.began == ["one 0", "one 1", "one 2", "two 0", "one 3", "two 1", "one 4"]


def test_close_ends_the_waits(compiling: Compiling) -> None:
    asked = [compiling.ask(ONE, f"{number}") for number in range(3)]
    compiling.semaphore.close(TaskLost("it closes"))
    with pytest.raises(TaskLost, match="it closes"):
        asked[2].result(DEADLINE_S)
    with pytest.raises(TaskLost, match="it closes"), compiling.semaphore.held_for(TWO):
        pass
    compiling.may_end.release()
    asked[0].result(DEADLINE_S)


def test_a_wait_ends_at_its_deadline(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        compiling.ask(ONE, f"{number}")
    text = f"other programs were compiled for 0.01 s before one of {TWO}"
    with monkeypatch.context() as brief:
        brief.setattr(fair_semaphore, "COMPILE_TIMEOUT_S", 0.01)
        with pytest.raises(DeadlineExceeded, match=text), compiling.semaphore.held_for(TWO):
            pass
    assert compiling.waiting == 0
    compiling.ask(ONE, "later")
    compiling.end_one()
    assert compiling.began == ["0", "1", "later"]


def interrupt_waits(monkeypatch: pytest.MonkeyPatch, error: type[BaseException], act: Callable[[], None]) -> None:
    """Interrupt each wait for the semaphore, after an act."""

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            if timeout is None:
                return super().result()
            act()
            raise error

    monkeypatch.setattr(fair_semaphore, "Future", Interrupted)


@pytest.mark.parametrize("is_released", [False, True])
def test_an_interrupted_wait_does_not_keep_the_semaphore(monkeypatch: pytest.MonkeyPatch, is_released: bool) -> None:
    semaphore = FairSemaphore(1)
    interrupt_waits(monkeypatch, KeyboardInterrupt, semaphore._release if is_released else lambda: None)
    semaphore._acquire(ONE)
    with pytest.raises(KeyboardInterrupt), semaphore.held_for(TWO):
        pass
    assert (semaphore._free, semaphore._waiting) == (is_released, {})


def test_a_wait_that_ends_as_its_deadline_passes_has_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    semaphore = FairSemaphore(1)
    interrupt_waits(monkeypatch, FutureTimeoutError, semaphore._release)
    semaphore._acquire(ONE)
    with semaphore.held_for(TWO):
        assert semaphore._free == 0
        interrupt_waits(monkeypatch, FutureTimeoutError, lambda: semaphore.close(TaskLost("it closes")))
        with pytest.raises(TaskLost, match="it closes"), semaphore.held_for(ONE):
            pass
    assert semaphore._free == 1


def test_a_wait_that_close_ends_has_its_error_even_if_that_is_a_deadline(compiling: Compiling) -> None:
    asked = [compiling.ask(ONE, f"{number}") for number in range(3)]
    compiling.semaphore.close(DeadlineExceeded("it closes"))
    with pytest.raises(DeadlineExceeded, match="it closes"):
        asked[2].result(DEADLINE_S)


def test_by_default_there_is_a_holder_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_semaphore.os, "sched_getaffinity", lambda _: {3, 5})
    semaphore = FairSemaphore()
    with suppress(ZeroDivisionError), semaphore.held_for(ONE), semaphore.held_for(ONE):
        assert semaphore._free == 0
        raise ZeroDivisionError
    assert semaphore._free == 2


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
