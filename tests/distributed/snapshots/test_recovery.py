"""Snapshots and the return to them, as the coordinator decides them: what is committed, loaded, redone and refused."""

from __future__ import annotations

from typing import Any

import pytest

from dflow.distributed.coordinator.coordinator_events import PeerClosed
from dflow.distributed.snapshots.cluster_snapshots import CAPTURE_S, ClusterSnapshots, SnapshotPhase
from dflow.distributed.snapshots.pause_messages import PauseSteps
from dflow.distributed.snapshots.recovery import LOAD_S, NOTICE_S, RETURN_S
from dflow.distributed.snapshots.snapshot_messages import (
    AwaitRecovery,
    CaptureState,
    LoadState,
    Recovered,
    SaveChanges,
    Saved,
    StateLoaded,
    StateWritten,
)
from dflow.distributed.snapshots.snapshot_schedule import PAUSE_S
from dflow.distributed.training.work_messages import Claimed
from dflow.distributed.wire.messages.placement import Unplace
from tests.distributed.snapshots.recovering_tasks import PS, WORKER, Tasks, claim, sent


def test_new_state_is_saved_at_once_and_again_after_each_interval() -> None:
    tasks = Tasks()
    tasks.snapshot()
    assert [*tasks.disk[PS[0]]] == [*tasks.disk[PS[1]]] == [1]
    tasks.tick(2.5)
    tasks.settle()
    assert [*tasks.disk[PS[0]]] == [1]
    tasks.tick(2.5)
    tasks.settle()
    assert [*tasks.disk[PS[0]]] == [*tasks.disk[PS[1]]] == [2]


def test_a_variable_that_is_placed_and_not_created_is_in_no_snapshot() -> None:
    tasks = Tasks()
    tasks.place("late", PS[0], is_created=False)
    for names in ((), ("v0", "v1", "late")):
        for _ in range(3):
            tasks.snapshot()
        assert tasks.state.core.part(ClusterSnapshots).committed.names == names
        assert tasks.gate == 0
        tasks.created[PS[0]].add("late")


CHANGE = SaveChanges(WORKER, 3.0)


def test_a_change_that_no_step_makes_again_is_saved_immediately() -> None:
    tasks = Tasks()
    tasks.tick()
    tasks.each(*tasks.peer)
    assert sent(tasks, CaptureState) == {*PS}
    ask = tasks.waiting(CHANGE)  # during a capture it waits for the next snapshot
    tasks.settle()
    assert ask not in tasks.answers
    tasks.snapshot()
    assert tasks.answers[ask] == Saved(is_saved=True)
    tasks.snapshot()
    assert [*tasks.disk[PS[0]]] == [2]
    assert Tasks(every_s=0.0).ask(CHANGE) == Saved(is_saved=True), "there are no snapshots"


def test_a_change_is_not_waited_for_longer_than_its_task_asks_for_or_after_a_return() -> None:
    tasks = Tasks()
    tasks.snapshot()
    ask = tasks.waiting(CHANGE)
    tasks.tick(1.0)
    assert ask not in tasks.answers
    tasks.tick(2.0)
    assert tasks.answers[ask] == Saved(is_saved=False)
    ask = tasks.waiting(CHANGE)
    tasks.start_again(PS[1])
    tasks.settle()
    text = "the change of state is lost: ps:0, ps:1 returned to snapshot 1, which was made before it"
    assert tasks.refusal(ask) == text


def test_a_worker_in_a_long_step_ends_the_attempt_at_a_snapshot() -> None:
    tasks = Tasks()
    tasks.tick()
    tasks.each(*PS)
    assert claim(tasks, 1) is None
    ask = tasks.asks
    tasks.doing[WORKER] = "tracing and compiling step"
    tasks.tick(PAUSE_S + 1)
    late = f"worker:0 still runs a step after {PAUSE_S:g} s (worker:0: tracing and compiling step)"
    assert late in tasks.log[-1]
    assert tasks.answers[ask] == Claimed(0, 15)


def test_a_worker_in_a_long_step_holds_up_the_others_for_a_third_of_the_time_at_most() -> None:
    tasks = Tasks()
    tasks.tick()
    tasks.each(*PS)
    paused = 0
    for _ in range(300):
        tasks.tick()
        paused += tasks.state.core.part(ClusterSnapshots).phase is not SnapshotPhase.IDLE
        for task in PS:
            while tasks.deliver(task):
                pass
    assert 300 / 10 < paused <= 300 / 3 + PAUSE_S
    tasks.settle()
    tasks.tick(2 * PAUSE_S)
    tasks.settle()
    assert [*tasks.disk[PS[0]]], "the step has ended"


def test_a_name_that_is_never_created_is_logged_and_tried_less_and_less() -> None:
    tasks = Tasks(every_s=60.0)
    tasks.place("never", PS[0], is_created=False)
    begun = 0
    for _ in range(300):
        tasks.snapshot()
        number = tasks.state.core.part(ClusterSnapshots).counted.number
        begun = max(begun, number)
    line = "no snapshot can be made: never was placed, and not created in 30 s"
    assert [one for one in tasks.log if "no snapshot can be made" in one] == [line]
    assert 8 < begun < 14
    tasks.created[PS[0]].add("never")
    tasks.tick(60.0)
    tasks.settle()
    assert tasks.state.core.part(ClusterSnapshots).committed.number > 0


def test_names_that_are_created_while_a_program_starts_are_not_logged() -> None:
    tasks = Tasks(every_s=5.0)
    for number in range(40):
        tasks.place(f"new {number}", PS[0], is_created=False)
        tasks.snapshot()
        tasks.created[PS[0]].add(f"new {number - 4}")
    assert not any("no snapshot can be made" in line for line in tasks.log)


def test_freed_state_is_not_made_again_by_a_return() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.ask(Unplace("v0"))
    tasks.start_again(PS[1])
    tasks.deliver(WORKER)
    for task in PS:
        while not sent(tasks, LoadState) and tasks.deliver(task):
            pass
    loads = [one for one in tasks.inbox[PS[0]] if isinstance(one, LoadState)]
    assert [one.forgotten for one in loads] == [("v0",)]


def test_a_return_that_takes_too_long_is_given_up_and_the_error_names_the_task() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[1])
    ask = tasks.waiting(AwaitRecovery(WORKER))
    while not sent(tasks, LoadState):
        tasks.each(*tasks.peer)
    tasks.tick(LOAD_S + 1)
    assert f"ps:0, ps:1 did not return to the snapshot within {LOAD_S:g} s" in tasks.refusal(ask)


def test_a_part_that_cannot_be_written_leaves_the_last_snapshot_in_place() -> None:
    tasks = Tasks()
    tasks.snapshot()
    claim(tasks, 1)
    claim(tasks, 2, 1, 15)
    tasks.now_s += 10
    tasks.tick()
    tasks.each(*PS, WORKER, *PS)
    tasks.writing.clear()
    tasks.tell(PS[0], StateWritten(PS[0], 2, "no space left"))
    assert tasks.log[-1] == "a snapshot is abandoned, and no other begins for 1 s: ps:0: no space left"
    tasks.start_again(PS[1])
    tasks.settle()
    assert "ps:0, ps:1 returned to snapshot 1; 15 steps are done again" in tasks.log


@pytest.mark.parametrize("end", [Tasks.start_again, Tasks.stop])
def test_a_snapshot_ends_with_a_task_that_has_a_part_of_it_and_silently_at_a_normal_end(end: Any) -> None:
    tasks = Tasks()
    tasks.tick()
    tasks.each(*tasks.peer)
    assert sent(tasks, CaptureState) == {*PS}
    end(tasks, PS[1])
    assert tasks.state.core.part(ClusterSnapshots).phase is not SnapshotPhase.CAPTURING
    text = "a snapshot is abandoned, and no other begins for 1 s: ps:1 has left or joined again"
    assert (text in tasks.log) == (end is Tasks.start_again)


def test_a_task_that_does_not_capture_its_state_holds_up_the_steps_for_a_while_only() -> None:
    tasks = Tasks()
    tasks.tick()
    tasks.each(*tasks.peer)
    tasks.inbox[PS[1]].clear()
    assert claim(tasks, 1) is None
    ask = tasks.asks
    tasks.tick(CAPTURE_S + 1)
    assert f"ps:1 did not capture its state within {CAPTURE_S:g} s" in tasks.log[-1]
    assert tasks.answers[ask] == Claimed(0, 15)


def test_without_snapshots_there_is_no_recovery() -> None:
    tasks = Tasks(every_s=0.0)
    for _ in range(3):
        tasks.snapshot()
    assert not any(tasks.disk.values())
    start, end = "the lost state is not restored: ", "no snapshots are made: start the cluster with --snapshots DIR"
    tasks.ask(AwaitRecovery(WORKER))
    assert tasks.refusal(tasks.asks) == f"{start}no task is known to have lost its state, and {end}"
    tasks.start_again(PS[0])
    tasks.ask(AwaitRecovery(WORKER))
    assert tasks.refusal(tasks.asks) == start + end


def test_state_lost_before_the_first_snapshot_is_made_again_from_the_beginning() -> None:
    tasks = Tasks()
    assert claim(tasks, 1) == Claimed(0, 15)
    tasks.applied = {task: {*range(9)} for task in PS}
    tasks.start_again(PS[0])
    ask = tasks.waiting(AwaitRecovery(WORKER))
    tasks.settle()
    assert tasks.answers[ask] == Recovered(1, 1)
    assert tasks.applied == {task: set() for task in PS}
    assert (
        "ps:0, ps:1 returned to the beginning; 0 steps are done again; 2 variables and queues made since are made again"
        in tasks.log
    )
    assert tasks.created == {PS[0]: {"v0"}, PS[1]: {"v1"}}
    assert claim(tasks, 2, 1, 9) == Claimed(0, 15)


def test_state_that_no_snapshot_has_is_freed_everywhere_and_made_again() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.place("late", PS[1])
    tasks.place("later", PS[0], is_created=False)
    tasks.start_again(PS[0])
    tasks.each(*PS, WORKER, *PS)
    setting = [tasks.inbox[task][-1] for task in PS]
    assert {one.unsaved for one in setting if isinstance(one, LoadState)} == {("late", "later")}
    tasks.settle()
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1, 1)
    assert tasks.created == {PS[0]: {"v0"}, PS[1]: {"v1", "late"}}
    tasks.snapshot()
    assert tasks.state.core.part(ClusterSnapshots).committed.names == ("v0", "v1", "late")


def test_a_task_that_does_not_come_back_is_named() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.handle(PeerClosed(tasks.now_s, tasks.peer.pop(PS[0]), "its process has ended"))
    ask = tasks.waiting(AwaitRecovery(WORKER))
    tasks.tick(RETURN_S / 2)
    assert ask not in tasks.answers
    tasks.tick(RETURN_S)
    assert tasks.refusal(ask) == f"ps:0 did not come back within {RETURN_S:g} s"


def test_a_step_that_does_not_end_is_named_and_the_return_goes_on_after_it() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[0])
    tasks.settle_all_but(WORKER)
    ask = tasks.waiting(AwaitRecovery(WORKER))
    tasks.tick(NOTICE_S)
    assert tasks.log[-1] == f"the return to a snapshot waits: worker:0 still runs a step after {NOTICE_S:g} s"
    tasks.tick(RETURN_S)
    assert tasks.refusal(ask) == f"worker:0 still runs a step after {RETURN_S:g} s"
    assert tasks.log[-1].startswith("the return to a snapshot waits"), "once"
    tasks.settle()
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1, 1)


def test_a_pause_that_does_not_end_is_named() -> None:
    tasks = Tasks()
    tasks.snapshot()
    assert tasks.ask(PauseSteps(WORKER)) is None
    tasks.settle()
    tasks.start_again(PS[0])
    ask = tasks.waiting(AwaitRecovery(WORKER))
    tasks.tick(1.0)
    tasks.tick(RETURN_S)
    assert tasks.refusal(ask) == f"worker:0 has paused the steps for {RETURN_S:g} s"


def test_a_part_that_cannot_be_loaded_is_the_reason() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.start_again(PS[0])
    tasks.each(*PS, WORKER)
    tasks.applied = {task: {1} for task in PS}
    tasks.deliver(PS[1])
    tasks.tell(PS[0], StateLoaded(PS[0], 1, failure="array 'v0' is damaged"))
    tasks.ask(AwaitRecovery(WORKER))
    assert tasks.refusal(tasks.asks).endswith("ps:0 could not return to the snapshot: array 'v0' is damaged")
    assert tasks.applied[PS[1]] == {1}, "no task has set its state"
    tasks.inbox[PS[0]].clear()
    tasks.settle()
    assert tasks.gate == 0
    tasks.start_again(PS[0])  # with a good disk
    tasks.settle()
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(2, 1)
