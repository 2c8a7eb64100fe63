"""Threads on demand, none of whose calls waits for another, and requests that delay only those of their own task."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dflow.distributed.task.request_queues import MOST_OF_A_TASK, RequestQueues
from dflow.distributed.task.threads import OnDemandThreads
from tests.distributed.waiting import DEADLINE_S, until

ONE, TWO = "/job:worker/task:0", "/job:worker/task:1"


class Slow:
    """Requests that end one by one."""

    def __init__(self) -> None:
        self.threads = OnDemandThreads("slow")
        self.queues = RequestQueues(self.threads)
        self.began: list[int] = []
        self.may_end = threading.Semaphore(0)

    def ask(self, task: str, *numbers: int) -> None:
        for number in numbers:
            self.queues.submit(task, self._do, number)

    def _do(self, number: int) -> None:
        self.began.append(number)
        assert self.may_end.acquire(timeout=DEADLINE_S)

    def until_begun(self, numbers: set[int]) -> None:
        until(lambda: len(self.began) == len(numbers))
        assert {*self.began} == numbers


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.queues.close()
    made.may_end.release(1000)
    made.threads.shutdown()


def test_a_task_has_a_limit_of_its_own(slow: Slow) -> None:
    slow.ask(ONE, *range(100))
    slow.ask(TWO, 100, 101)
    slow.until_begun({*range(MOST_OF_A_TASK), 100, 101})


def test_a_request_that_raises_is_logged_and_the_next_runs(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()
    for _ in range(MOST_OF_A_TASK):
        slow.ask(ONE, 0)
    slow.queues.submit(ONE, {}.pop, 0)
    slow.queues.submit(ONE, ran.set)
    slow.may_end.release()
    assert ran.wait(DEADLINE_S)
    assert f"a request of {ONE} failed after it was answered" in caplog.text


def test_after_close_no_request_begins(slow: Slow) -> None:
    slow.ask(ONE, *range(100))
    slow.until_begun({*range(MOST_OF_A_TASK)})
    slow.queues.close()
    slow.may_end.release(100)
    until(lambda: not slow.queues._tasks)
    assert len(slow.began) == MOST_OF_A_TASK


def test_a_request_without_a_thread_is_not_counted(slow: Slow) -> None:
    slow.threads.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        slow.ask(ONE, 0)
    assert not slow.queues._tasks


# The threads.


def alive(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_calls_run_at_the_same_time_however_many_there_are() -> None:
    threads, together = OnDemandThreads("together"), threading.Barrier(100, timeout=DEADLINE_S)
    for _ in range(3):
        waiting = [threads.submit(together.wait) for _ in range(100)]
        assert sorted(call.result(DEADLINE_S) for call in waiting) == [*range(100)]
    threads.shutdown()


def test_an_idle_thread_is_used_again() -> None:
    threads = OnDemandThreads("again")
    for number in range(10):
        assert threads.submit(lambda x: x + 1, number).result(DEADLINE_S) == number + 1
        until(lambda: len(threads._idle) == 1)
    assert alive("again") == 1
    threads.shutdown()


def test_shutdown_waits_for_no_call_unless_asked_and_ends_the_threads() -> None:
    threads, may_end = OnDemandThreads("ending"), threading.Event()
    running = threads.submit(may_end.wait, DEADLINE_S)
    threads.submit(lambda: None).result(DEADLINE_S)
    threads.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(lambda: None)
    may_end.set()
    assert running.result(DEADLINE_S)
    until(lambda: alive("ending") == 0)


def test_a_thread_that_cannot_be_started_takes_no_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ran = OnDemandThreads("refused"), threading.Event()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(ran.set)
    assert threads.submit(lambda: 1).result(DEADLINE_S) == 1
    assert not ran.is_set()
    threads.shutdown()
