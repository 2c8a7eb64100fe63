"""Threads on demand: none of the calls waits for another."""

from __future__ import annotations

import threading

import pytest

from dflow.distributed.task.threads import OnDemandThreads
from tests.distributed.waiting import DEADLINE_S, until


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
