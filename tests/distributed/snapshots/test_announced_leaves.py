"""A parameter task that announces its leave: no step is lost or done again, and no step waits for ever."""

from __future__ import annotations

from dflow.distributed.snapshots.recovery import RETURN_S
from dflow.distributed.snapshots.snapshot_messages import (
    AnnounceLeave,
    AwaitRecovery,
    CaptureState,
    LoadState,
    Recovered,
    StateWritten,
)
from dflow.distributed.snapshots.snapshot_schedule import PAUSE_S
from dflow.distributed.training.work_messages import Claimed, StepsDone
from dflow.distributed.wire.messages.basic import Ok
from tests.distributed.snapshots.recovering_tasks import PS, WORKER, Tasks, claim, sent


def announced(tasks: Tasks, task: str = PS[0]) -> int:
    return tasks.waiting(AnnounceLeave(task), task)


def working() -> Tasks:
    """Tasks with a snapshot, and a worker that has done 5 of its 15 claimed steps since."""
    tasks = Tasks()
    tasks.snapshot()
    assert claim(tasks, 1) == Claimed(0, 15)
    tasks.applied = {task: {*range(5)} for task in PS}
    return tasks


def test_steps_stay_paused_from_the_snapshot_until_the_return() -> None:
    tasks = working()
    ask = announced(tasks)
    tasks.settle()
    assert tasks.answers[ask] == Ok()
    assert tasks.gate, "the steps are paused"
    assert [*tasks.disk[PS[0]]] == [*tasks.disk[PS[1]]] == [2]
    tasks.tell(WORKER, StepsDone("run", WORKER, 0, 5, 0.0, {}))  # sent after the report that no step runs
    tasks.stop(PS[0])
    tasks.settle()
    assert tasks.gate
    tasks.join(PS[0])
    while tasks.gate:
        assert any([*map(tasks.deliver, tasks.peer)])
    tasks.settle()
    assert not tasks.fresh
    assert tasks.applied == {task: {*range(5)} for task in PS}
    assert "ps:0, ps:1 returned to snapshot 2; 0 steps are done again" in tasks.log
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1, 0)
    assert claim(tasks, 2, 1, 15) == Claimed(15, 11), "the claim of before is as good as it was"


def test_a_snapshot_that_is_being_written_is_too_old() -> None:
    tasks = working()
    tasks.now_s += 10
    tasks.tell(WORKER, StepsDone("run", WORKER, 0, 5, 0.0, {}))
    tasks.tick()
    tasks.each(*PS, WORKER, *PS, WORKER)
    assert not tasks.gate, "steps run again"
    ask = announced(tasks)
    tasks.settle()
    assert tasks.answers[ask] == Ok()
    assert [*tasks.disk[PS[0]]] == [3]


def test_a_worker_that_was_away_during_the_pause_makes_the_return_an_ordinary_one() -> None:
    tasks = working()
    announced(tasks)
    tasks.settle()
    tasks.connect(WORKER)  # it may have begun a step before it knew of the pause
    tasks.tell(WORKER, StepsDone("run", WORKER, 0, 6, 0.0, {}))
    tasks.stop(PS[0])
    tasks.join(PS[0])
    tasks.settle()
    assert "ps:0, ps:1 returned to snapshot 2; 6 steps are done again" in tasks.log
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(1, 1)


def test_without_its_next_process_the_steps_fail_at_the_usual_deadline() -> None:
    tasks = working()
    announced(tasks)
    tasks.settle()
    tasks.stop(PS[0])
    tasks.tick(RETURN_S / 2)
    tasks.settle()
    assert tasks.gate
    tasks.tick(RETURN_S / 2 + 1)
    tasks.settle()
    assert not tasks.gate
    assert f"ps:0 announced to leave, and did not come back within {RETURN_S:g} s" in tasks.log
    tasks.ask(AwaitRecovery(WORKER))
    assert tasks.refusal(tasks.asks) == f"ps:0 did not come back within {RETURN_S:g} s"


def test_a_task_that_does_not_leave_ends_the_pause_too() -> None:
    tasks = working()
    announced(tasks)
    tasks.settle()
    tasks.tick(RETURN_S + 1)
    tasks.settle()
    assert not tasks.gate
    assert tasks.ask(AwaitRecovery(WORKER)) == Recovered(0, 0)


def test_steps_stay_paused_while_tasks_read_for_longer_than_a_task_may_be_away() -> None:
    tasks = working()
    announced(tasks)
    tasks.settle()
    tasks.stop(PS[0])
    tasks.join(PS[0])
    assert sent(tasks, LoadState) == {*PS}
    tasks.tick(RETURN_S + 1)
    assert tasks.gate
    tasks.settle()
    assert not tasks.gate
    assert "ps:0, ps:1 returned to snapshot 2; 0 steps are done again" in tasks.log


def test_a_task_that_leaves_before_its_snapshot_is_complete_ends_the_pause() -> None:
    tasks = working()
    announced(tasks)
    tasks.each(*PS)
    tasks.tick(PAUSE_S + 1)  # the worker is in a long step: the task waits as long as it can
    assert sent(tasks, CaptureState) == set()
    tasks.stop(PS[0])
    tasks.tick(PAUSE_S + 1)
    tasks.join(PS[0])
    tasks.settle()
    assert not tasks.gate
    assert "ps:0, ps:1 returned to snapshot 1; 0 steps are done again" in tasks.log
    assert tasks.applied == {task: set() for task in PS}


def test_a_part_that_cannot_be_written_is_the_answer() -> None:
    tasks = working()
    ask = announced(tasks)
    tasks.each(*PS, WORKER, *PS)
    tasks.writing.clear()
    tasks.tell(PS[1], StateWritten(PS[1], 2, "no space left"))
    assert tasks.refusal(ask) == "no snapshot could be made: ps:1: no space left"
    tasks.settle()
    assert not tasks.gate


def test_a_task_without_state_and_one_without_snapshots_leave_at_once() -> None:
    tasks = Tasks()
    assert tasks.ask(AnnounceLeave(WORKER)) == Ok()
    tasks = Tasks(every_s=0.0)
    tasks.ask(AnnounceLeave(PS[0]), PS[0])
    assert tasks.refusal(tasks.asks).startswith("no snapshots are made")
