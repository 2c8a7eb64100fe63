from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable

import pytest

from dflow.lowering.queues.timers import Timers

DEADLINE_S = 30.0


def test_calls_come_once_and_the_sooner_first() -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    timers.after(0.3, lambda: called.put("later"))
    timers.after(0.0, lambda: called.put("sooner"))
    assert [called.get(timeout=DEADLINE_S) for _ in range(2)] == ["sooner", "later"]
    timers.after(0.0, lambda: called.put("after"))
    assert called.get(timeout=DEADLINE_S) == "after"
    assert called.empty()


def test_a_stopped_timer_does_not_call_and_is_forgotten() -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    stopped = [timers.after(DEADLINE_S, lambda: called.put("stopped")) for _ in range(100)]
    for timer in stopped:
        timer.stop()
        timer.stop()
    assert len(timers) == 0
    timers.after(0.0, lambda: called.put("kept")).stop()
    last = timers.after(0.0, lambda: called.put("last"))
    assert called.get(timeout=DEADLINE_S) == "last"
    last.stop()
    assert called.empty()


@pytest.mark.parametrize("call", [[].pop, sys.exit], ids=["fails", "ends its thread"])
def test_a_call_that_fails_leaves_the_others_standing(call: Callable[[], object]) -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    timers.after(0.0, call)
    timers.after(0.01, lambda: called.put("other"))
    assert called.get(timeout=DEADLINE_S) == "other"


@pytest.mark.parametrize("delay_s", [math.inf, 1e10])
def test_a_delay_longer_than_the_system_can_wait_leaves_the_others_standing(delay_s: float) -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    endless = timers.after(delay_s, lambda: called.put("never"))
    for _ in range(3):
        timers.after(0.01, lambda: called.put("other"))
        assert called.get(timeout=DEADLINE_S) == "other"
    endless.stop()
    assert len(timers) == 0


def test_a_thread_that_the_system_refused_is_started_by_the_next_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            timers.after(DEADLINE_S, lambda: called.put("refused"))
    timers.after(0.0, lambda: called.put("next"))
    assert called.get(timeout=DEADLINE_S) == "next"


def test_closed_timers_make_no_more_calls_and_end_their_thread() -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers("timers of a test")
    timers.after(DEADLINE_S, lambda: called.put("before"))
    [thread] = [thread for thread in threading.enumerate() if thread.name == "timers of a test"]
    timers.close()
    timers.after(0.0, lambda: called.put("after")).stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert called.empty()
