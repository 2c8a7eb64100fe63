from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.distributed.wire.messages.status import TaskHealth
from tests.effort import examples

TASK = "/job:ps/task:0"


def test_busy_without_progress_for_the_time_is_a_stall_that_is_told_once() -> None:
    watch = ProgressWatch(60.0)
    watch.hear(0, 10.0, Heartbeat(TASK, (), 5, "step 6"), True)
    watch.hear(0, 69.0, Heartbeat(TASK, (), 5, "step 6: waits"), True)
    assert watch.tick(69.9) == []
    assert watch.tick(70.0) == [(TaskHealth(TASK, 69.0, 5, "step 6: waits", 10.0), 60.0)]
    assert watch.tick(80.0) == []
    assert watch.health[0] == TaskHealth(TASK, 69.0, 5, "step 6: waits", 10.0)
    assert watch.hear(0, 90.0, Heartbeat(TASK, (), 6, "step 7"), True) == 80.0
    assert watch.hear(0, 91.0, Heartbeat(TASK, (), 6, "step 7"), True) is None
    assert watch.tick(149.9) == []
    assert watch.tick(150.0) == [(TaskHealth(TASK, 91.0, 6, "step 7", 90.0), 60.0)]


def test_a_task_that_has_left_stalls_no_more() -> None:
    watch = ProgressWatch(60.0)
    watch.hear(0, 0.0, Heartbeat(TASK, (), 5, "step"), True)
    watch.leave(0)
    watch.leave(0)
    assert watch.tick(100.0) == []
    assert watch.health == {}


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 80)), max_size=60))
def test_stalls_begin_and_end_in_turn_and_only_without_progress(acts: list[tuple[int, bool, int]]) -> None:
    watch, at_s, steps, since_s, is_stalled = ProgressWatch(60.0), 0.0, 0, 0.0, False
    was_busy = False
    for more, is_busy, pause_s in acts:
        at_s += pause_s
        [*began] = watch.tick(at_s)
        assert bool(began) == (was_busy and not is_stalled and at_s - since_s >= 60.0)
        is_stalled = is_stalled or bool(began)
        steps += more
        moves = more > 0 or not is_busy or not was_busy
        stall_s = watch.hear(7, at_s, Heartbeat(TASK, (), steps), is_busy)
        assert stall_s == (at_s - since_s if is_stalled and moves else None)
        if moves:
            since_s, is_stalled = at_s, False
        was_busy = is_busy
