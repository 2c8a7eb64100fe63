from __future__ import annotations

import queue

from dflow.lowering.timers import Timers

DEADLINE_S = 30.0


def test_calls_come_once_and_the_sooner_first() -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    timers.start(0.02, lambda: called.put("later"))
    timers.start(0.0, lambda: called.put("sooner"))
    assert [called.get(timeout=DEADLINE_S) for _ in range(2)] == ["sooner", "later"]
    timers.start(0.0, lambda: called.put("after"))
    assert called.get(timeout=DEADLINE_S) == "after"
    assert called.empty()


def test_a_stopped_timer_does_not_call_and_is_forgotten() -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    stopped = [timers.start(DEADLINE_S, lambda: called.put("stopped")) for _ in range(100)]
    for timer in stopped:
        timer.stop()
        timer.stop()
    assert len(timers) == 0
    timers.start(0.0, lambda: called.put("kept")).stop()
    last = timers.start(0.0, lambda: called.put("last"))
    assert called.get(timeout=DEADLINE_S) == "last"
    last.stop()
    assert called.empty()


def test_a_call_that_fails_leaves_the_others_standing() -> None:
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers = Timers()
    timers.start(0.0, [].pop)
    timers.start(0.01, lambda: called.put("other"))
    assert called.get(timeout=DEADLINE_S) == "other"
