"""A coordinator that starts again after all processes have ended: the snapshot that it resumes, or why not."""

from __future__ import annotations

import msgspec
import pytest

from dflow.distributed.snapshots.resumption import PROGRESS, newest_snapshot
from dflow.distributed.snapshots.snapshot_messages import AwaitRecovery, Recovered
from dflow.distributed.training.work_messages import ROUNDS, Claimed, ClaimSteps, RoundsDone, TrainingPlan
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.roster import Roster
from tests.distributed.snapshots.recovering_tasks import JOBS, PS, WORKER, Tasks, claim


def ended(jobs: dict[str, int] = JOBS) -> Tasks:
    """Tasks that have all ended after a snapshot with 15 steps, and 11 more steps; the coordinator runs again."""
    tasks = Tasks()
    assert claim(tasks, 1) == Claimed(0, 15)
    tasks.applied = {task: {*range(15)} for task in PS}
    assert claim(tasks, 2, 1, 15) == Claimed(15, 11)
    tasks.snapshot()
    tasks.applied = {task: {*range(26)} for task in PS}
    assert claim(tasks, 3, 2, 11) == Claimed(26, 8)
    tasks.place("late", PS[1])
    tasks.end_all(jobs)
    return tasks


def start_all(tasks: Tasks) -> None:
    for task in (WORKER, *PS):
        tasks.join(task)
    assert not tasks.answers.get(tasks.asks), "it waits for processes of before"
    tasks.tick(tasks.settings.heartbeat_timeout_s)
    tasks.settle()


JOINING = AwaitRecovery(WORKER, is_joining=True)
PLAN = TrainingPlan("fit", WORKER, 50, 300)


def test_the_progress_of_a_trainer_that_goes_on_is_that_of_its_whole_run() -> None:
    tasks = Tasks()
    tasks.tell(WORKER, PLAN)
    tasks.tell(WORKER, TrainingPlan("of later", WORKER, 0, 1000))
    assert tasks.ask(ClaimSteps("fit 50-100", WORKER, 50, 1)) == Claimed(0, 12)
    tasks.ask(ClaimSteps("fit 50-100", WORKER, 50, 2, 1, 12))
    tasks.tell(WORKER, RoundsDone("fit 100-150", WORKER, 3, 50, 1))
    tasks.snapshot()
    tasks.tell(WORKER, msgspec.structs.replace(PLAN, is_over=True))
    tasks.end_all()
    tasks.join(WORKER)
    tasks.tick(tasks.settings.heartbeat_timeout_s)
    assert progress(tasks) == (65, 300), "before the tasks load it"
    for task in PS:
        tasks.join(task)
    tasks.settle()
    assert any("with 65 steps done" in line for line in tasks.log)
    assert progress(tasks) == (65, 300), "before the trainer begins"
    tasks.tell(WORKER, msgspec.structs.replace(PLAN, first=100))
    assert progress(tasks) == (65, 300)


def test_a_trainer_without_a_step_in_the_snapshot_may_begin_at_its_checkpoint() -> None:
    tasks = Tasks()
    tasks.tell(WORKER, msgspec.structs.replace(PLAN, first=0))
    tasks.ask(ClaimSteps("fit 0-50", WORKER, 50, 1))
    tasks.snapshot()
    tasks.end_all()
    start_all(tasks)
    tasks.tell(WORKER, PLAN)
    assert progress(tasks) == (50, 300)


@pytest.mark.parametrize(("run", "is_counted"), [("fit 0-50", False), ("fit 50-100", True), ("own loop", True)])
def test_rounds_that_are_not_reported_count_as_soon_as_a_later_checkpoint_may_miss_them(
    run: str, is_counted: bool
) -> None:
    tasks = Tasks()
    tasks.place(f"{PROGRESS}/of the manager", PS[1])
    tasks.tell(WORKER, msgspec.structs.replace(PLAN, first=0))
    tasks.ask(PlaceVariable(f"{run}{ROUNDS}", "", (), 0, "ps", kind="run", is_saved=False))
    tasks.snapshot()
    snapshot = newest_snapshot(tasks.rows)
    assert snapshot is not None
    assert (snapshot.steps_done is not None) == is_counted


def progress(tasks: Tasks) -> tuple[int, int]:
    status = tasks.state.status(tasks.now_s)
    return status.steps_done, status.steps_total


def test_new_processes_go_on_from_the_snapshot() -> None:
    tasks = ended()
    start_all(tasks)
    assert tasks.ask(JOINING) == Recovered(1, 1)
    assert not tasks.fresh
    assert tasks.applied == {task: {*range(15)} for task in PS}
    assert any(
        "resuming snapshot 1, made 10 s before the last record of that cluster, with 15 steps done" in line
        for line in tasks.log
    )
    assert isinstance(tasks.ask(PlaceVariable("v1", "float32", (), 4, "ps")), Placed)
    assert isinstance(tasks.ask(PlaceVariable("late", "float32", (), 4, "ps")), Placed), "it is made again"
    assert claim(tasks, 1) == Claimed(15, 11)


def test_a_worker_waits_until_all_tasks_have_loaded_the_snapshot() -> None:
    tasks = ended()
    for task in (WORKER, PS[0]):
        tasks.join(task)
    tasks.tick(tasks.settings.heartbeat_timeout_s)
    ask = tasks.waiting(JOINING)
    tasks.settle()
    tasks.tick()
    assert ask not in tasks.answers
    tasks.join(PS[1])
    tasks.settle()
    assert tasks.answers[ask] == Recovered(1, 1)


def test_a_process_of_before_keeps_the_cluster() -> None:
    tasks = ended()
    tasks.join(WORKER)
    ask = tasks.asks
    assert ask not in tasks.answers
    tasks.connect(PS[0])  # it was cut off, and is the process of before
    assert isinstance(tasks.answers[ask], Roster)
    tasks.join(PS[1])
    tasks.tick(tasks.settings.heartbeat_timeout_s)
    assert not any("another cluster" in line for line in tasks.log)


def test_another_program_is_refused_by_the_name_of_its_variable() -> None:
    tasks = ended()
    start_all(tasks)
    answer = tasks.ask(PlaceVariable("v1", "float32", (3,), 12, "ps"))
    assert isinstance(answer, Failure)
    assert answer.text.startswith("variable 'v1' is float32[] and was asked for as float32[3]")
    assert answer.text.endswith(
        "the job goes on from snapshot 1, which has the first: give the program of that snapshot, or another folder "
        "for --snapshots"
    )


def test_fewer_parameter_tasks_are_refused_before_training() -> None:
    tasks = ended({"ps": 1, "worker": 1})
    for task in (WORKER, PS[0]):
        tasks.join(task)
    tasks.tick(tasks.settings.heartbeat_timeout_s)
    tasks.ask(JOINING)
    text = "snapshot 1 has state of ps:1: expect as many tasks as it was made with"
    assert tasks.refusal(tasks.asks).endswith(text)
    for task in (WORKER, PS[0]):
        tasks.start_again(task)
    assert sum(text in line for line in tasks.log) == 1, "a join cannot change that"


def test_without_a_complete_snapshot_the_job_starts_from_the_beginning() -> None:
    tasks = Tasks()
    claim(tasks, 1)
    tasks.end_all()
    start_all(tasks)
    assert tasks.ask(JOINING) == Recovered(0, 0)
    assert isinstance(tasks.ask(PlaceVariable("v1", "int32", (), 4, "ps")), Placed)
    assert claim(tasks, 1) == Claimed(0, 15)


def test_elections_and_results_of_before_are_void() -> None:
    tasks = ended()
    before = {*tasks.rows}
    start_all(tasks)
    kept = {key for key in before & {*tasks.rows} if not key.startswith(("start/", "life/"))}
    names = ["identity", "placed/v0", "placed/v1", "revision", "roster version", "run/run", "snapshot/committed"]
    assert kept == {*names, "snapshots/counted"}
