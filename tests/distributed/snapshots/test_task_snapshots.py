"""A task's parts of snapshots: what they hold, what is left on the disk, and the return to them."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import structs

from dflow.distributed.snapshots.snapshot_messages import (
    CaptureState,
    LoadState,
    SnapshotCommitted,
    StateCaptured,
    StateLoaded,
    StateWritten,
)
from dflow.distributed.snapshots.task_snapshots import TaskSnapshots
from dflow.distributed.synchronous.step_aggregator import RunCopy, StepAggregator
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_resources import TaskResources
from dflow.distributed.task.task_server import TaskSettings
from dflow.distributed.wire.messages.message import Notice
from dflow.distributed.wire.messages.resources import CreateResource
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.pending_operations import wait
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.state.store import Store
from dflow.tracing.errors import CheckpointError, FeedError, StepCancelled, TaskLost
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, array_type_of
from tests.disk_faults import FAULTS
from tests.distributed.task_parts import without_server

PS = "/job:ps/task:0"
#: Values of several types, by key.
VALUES: dict[str, Callable[[], Any]] = {
    "w": lambda: jnp.arange(6.0).reshape(2, 3),
    "layers/0/b": lambda: jnp.ones(3, jnp.bfloat16),
    "count": lambda: jnp.int32(7),
    "key": lambda: jax.random.key(3),
    "none": lambda: jnp.zeros((0, 4)),
}


class Runs:
    def __init__(self) -> None:
        self.cancelled: list[StepId] = []

    def steps(self) -> list[StepId]:
        return [StepId("/job:worker/task:0", 5)]

    def cancel(self, step: StepId, error: BaseException) -> None:
        self.cancelled.append(step)


class Rounds(TaskPart):
    """Stands for the task's runs of synchronous training."""

    saved_as, copied = StepAggregator.saved_as, StepAggregator.copied

    def __init__(self) -> None:
        self.runs = (RunCopy("run", 9, 2, 2, 4), RunCopy("new", None, 0, None, 0))
        self.returned: tuple[RunCopy, ...] = ()

    def copy(self) -> tuple[RunCopy, ...]:
        return self.runs

    def return_to(self, copy: Iterable[RunCopy], epoch: int) -> None:
        self.returned = tuple(copy)


class Task:
    def __init__(self, folder: Path | None) -> None:
        self.store, self.runs, self.told = Store(), Runs(), list[Notice]()
        self.rounds = Rounds()
        self.resources = TaskResources(PS, self.store)
        self.snapshots = without_server(
            TaskSnapshots,
            name=PS,
            store=self.store,
            runs=self.runs,
            resources=self.resources,
            parts=(self.rounds,),
            settings=TaskSettings(snapshots=folder),
        )
        self.snapshots._tell = self.told.append

    def create(self) -> None:
        for key, make in VALUES.items():
            self.store.create(key, array_type_of(make()).strong, make)

    def failure(self, message: Notice) -> str:
        *_, report = self.do(message)
        assert isinstance(report, StateLoaded | StateWritten)
        return report.failure

    def do(self, message: Notice) -> list[Notice]:
        self.told.clear()
        self.snapshots.handle(message)
        return list(self.told)


def same(task: Task, values: dict[str, Any]) -> None:
    found = task.store.read_together(values)
    for key, value in values.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        one, other = (jax.random.key_data(v) if is_key else v for v in (found[key], value))
        np.testing.assert_array_equal(one, other)


def changes(task: Task, step: StepOfRun, key: str) -> bool:
    """Whether an attempt at a step makes its first change of a variable."""
    made: list[str] = []
    task.store.applied.attempt(step).once([key], lambda: made.append(key) or (), tuple)  # type: ignore[func-returns-value]
    return bool(made)


def test_an_empty_process_and_one_that_went_on_return_to_the_same_state(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.create()
    expected = {key: make() for key, make in VALUES.items()}
    whole, begun = StepOfRun("run", 4), StepOfRun("run", 5)
    task.store.applied.attempt(whole).ended()
    assert changes(task, begun, "w")
    assert task.do(CaptureState(1)) == [
        StateCaptured(PS, 1, tuple(VALUES)),
        StateWritten(PS, 1, written_bytes=42, full_bytes=42),
    ]
    task.store.update("w", "assign_add", jnp.ones((2, 3)))
    task.store.write("count", jnp.int32(9))
    task.store.applied.attempt(begun).ended()
    late = task.store.applied.attempt(StepOfRun("run", 6))
    for one in (task, Task(tmp_path)):
        before = one.store.read_together(one.store.keys())
        assert one.do(LoadState(1, 3)) == [StateLoaded(PS, 3)]
        same(one, before)
        assert not one.runs.cancelled
        assert one.do(LoadState(1, 3, is_set=True)) == [StateLoaded(PS, 3, is_set=True)]
        same(one, expected)
        assert one.runs.cancelled == one.runs.steps()
        assert one.rounds.returned == task.rounds.runs
        assert not changes(one, whole._replace(epoch=3), "w")
        assert not changes(one, begun._replace(epoch=3), "w")
        assert changes(one, begun._replace(epoch=3), "count")
        one.store.update("w", "assign_add", jnp.ones((2, 3)))  # the value is the variable's own
        # The request comes again, after a reconnection.
        assert one.do(LoadState(1, 3, is_set=True)) == [StateLoaded(PS, 3, is_set=True)]
        assert float(one.store.read("w")[0, 0]) == 1
    with pytest.raises(StepCancelled, match="restored meanwhile"):
        late.once(["w"], tuple, tuple)


def test_queues_and_accumulators_return_too_except_those_of_runs(tmp_path: Path) -> None:
    task = Task(tmp_path)
    queue = CreateResource("q", "queue<i32[], f32[?]>", QueueSettings(QueueKind.FIFO, 4))
    sums = CreateResource("a", "accumulator<f32[2]>", AccumulatorSettings(Reduction.SUM))
    for message in (queue, sums, structs.replace(sums, name="of a run", is_saved=False)):
        task.resources.create(message)
    put(task, 1, [0.5, 1.5])
    add(task, [1.0, 2.0])
    written = StateWritten(PS, 1, written_bytes=20, full_bytes=20)
    assert task.do(CaptureState(1)) == [StateCaptured(PS, 1, ("q", "a")), written]
    put(task, 2, [])
    add(task, [1.0, 2.0])
    for one in (task, Task(tmp_path)):
        assert one.do(LoadState(1, 3)) == [StateLoaded(PS, 3)]
        assert one.do(LoadState(1, 3, is_set=True)) == [StateLoaded(PS, 3, is_set=True)]
        assert [(int(number), row.tolist()) for number, row in held(one, "q").contents()] == [(1, [0.5, 1.5])]
        step, count, dropped, (total,) = held(one, "a").contents()
        assert (step, count, dropped, total.tolist()) == (0, 1, 0, [1.0, 2.0])
        one.resources.create(queue)  # of the same type and settings


def held(task: Task, name: str) -> Any:
    return task.resources._made[name].held


def put(task: Task, number: int, row: list[float]) -> None:
    element = np.int32(number), np.array(row, np.float32)
    wait(lambda done: held(task, "q").enqueue([element], done, 60.0))


def add(task: Task, gradient: list[float]) -> None:
    operands = np.array(gradient, np.float32), np.int32(0)
    wait(lambda done: held(task, "a").start(ResourceOp(ops.accumulator_apply.name), operands, done))


def test_an_empty_process_copies_what_it_has_read_only_when_it_creates_its_variables(tmp_path: Path) -> None:
    task, rows = Task(tmp_path), (1000, 100)
    task.store.create("table", ArrayType(np.dtype("float32"), rows), lambda: jnp.ones(rows))
    task.do(CaptureState(1))
    del task
    assert not (tables := live(rows)), tables
    again = Task(tmp_path)
    assert again.do(LoadState(1, 3)) == [StateLoaded(PS, 3)]
    assert not live(rows)
    again.do(LoadState(1, 3, is_set=True))
    assert len(live(rows)) == 1


def live(shape: tuple[int, ...]) -> list[jax.Array]:
    gc.collect()
    return [array for array in jax.live_arrays() if array.shape == shape]


def test_a_part_of_another_cluster_is_refused(tmp_path: Path) -> None:
    for cluster in ("blue", "red"):
        Task(tmp_path).do(CaptureState(1, 0, cluster))
    fact = "expected a part that cluster blue wrote, got one of cluster red"
    assert fact in Task(tmp_path).failure(LoadState(1, 1, False, "blue"))


def test_state_that_was_freed_is_not_made_again(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.create()
    task.resources.create(CreateResource("q", "queue<i32[]>", QueueSettings(QueueKind.FIFO, 4)))
    task.do(CaptureState(1))
    other = Task(tmp_path)
    other.do(LoadState(1, 1, is_set=True, forgotten=("w", "q")))
    assert {*other.store.keys()} == {*VALUES} - {"w"}
    assert not other.store.resources


@pytest.mark.parametrize("has_part", [True, False])
def test_state_that_was_made_after_the_snapshot_is_freed_and_can_be_made_again(tmp_path: Path, has_part: bool) -> None:
    task, made = Task(tmp_path), CreateResource("q", "queue<i32[]>", QueueSettings(QueueKind.FIFO, 4))
    task.create()
    task.resources.create(made)
    if has_part:
        task.do(CaptureState(1))  # the names were free then, and the part has them
    others, queue = () if has_part else (PS,), held(task, "q")
    for is_set in (False, True):
        message = LoadState(1, 1, is_set, unsaved=("w", "q") if is_set else ("q",), without=others)
        assert task.do(message) == [StateLoaded(PS, 1, is_set)]
    with pytest.raises(TaskLost, match="'w' was made after the snapshot to which all tasks have returned"):
        task.store.read("w")
    with pytest.raises(TaskLost, match="'q' was made after the snapshot to which all tasks have returned"):
        queue.with_machine(lambda machine: machine, "")
    task.create()
    task.resources.create(made)
    same(task, {"w": VALUES["w"]()})
    assert held(task, "q").depth() == (0, 4)


def test_a_closed_queue_is_open_again_in_a_job_that_is_resumed(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.resources.create(CreateResource("q", "queue<i32[], f32[?]>", QueueSettings(QueueKind.FIFO, 4)))
    put(task, 1, [0.5])
    held(task, "q").fail("ValueError: no data", "")
    task.do(CaptureState(1))
    for reopens in (True, False):
        other = Task(tmp_path)
        other.do(LoadState(1, 1, is_set=True, reopens=reopens))
        assert held(other, "q").machine.is_closed is not reopens
        assert held(other, "q").depth() == (1, 4)
        with nullcontext() if reopens else pytest.raises(FeedError, match="no data"):
            put(other, 2, [])


def test_parts_go_when_later_ones_are_committed_also_if_a_thread_begins_late(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.create()
    for number in (1, 3, 2):
        task.do(CaptureState(number, committed=0 if number == 1 else 1))
    assert {part.name for part in (tmp_path / "ps-0").iterdir()} == {"1", "2", "3"}
    for number in (4, 5):  # the part of the abandoned one goes with the next one
        task.do(CaptureState(number, committed=3))
        assert {part.name for part in (tmp_path / "ps-0").iterdir()} == {"3", str(number)}
    task.do(SnapshotCommitted(5))
    assert [part.name for part in (tmp_path / "ps-0").iterdir()] == ["5"]


def test_the_unfinished_part_of_a_process_that_was_killed_is_removed_at_the_next_start(tmp_path: Path) -> None:
    Task(tmp_path)
    folder, token = tmp_path / "ps-0", "0123456789abcdef"
    (folder / f".7.{token}.writing" / "w").mkdir(parents=True)
    (folder / f".7.{token}.lock").touch()
    Task(tmp_path)
    assert not [*folder.iterdir()]


def test_a_snapshot_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    there = Task(tmp_path)
    shutil.rmtree(tmp_path / "ps-0")
    (tmp_path / "ps-0").write_text("")
    for task, text in ((Task(None), "start it with --snapshots DIR"), (there, "is no folder")):
        task.create()
        assert text in task.failure(CaptureState(1))


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"ps:0: expected a folder that can be written .* got .*/file: Not a dir"):
        Task(tmp_path / "file")


def test_a_process_that_is_started_again_on_a_full_disk_loads_its_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(tmp_path)
    task.create()
    task.do(CaptureState(1))
    with FAULTS.within(tmp_path / "ps-0", 1, 3):
        other = Task(tmp_path)
    assert "no snapshot can be written to" in caplog.text
    other.do(LoadState(1, 1, is_set=True))
    same(other, {key: make() for key, make in VALUES.items()})


@pytest.mark.parametrize("harm", ["missing", "damaged", "none"])
def test_a_snapshot_that_cannot_be_loaded_is_reported_and_changes_nothing(tmp_path: Path, harm: str) -> None:
    task = Task(tmp_path)
    task.create()
    task.do(CaptureState(1))
    if harm == "damaged":
        files = (tmp_path / "ps-0" / "1" / "w").rglob("*")
        (chunk,) = (file for file in files if file.is_file() and file.name != "zarr.json")
        chunk.write_bytes(bytes(len(chunk.read_bytes())))
    task.store.write("count", jnp.int32(9))
    other = task if harm != "none" else Task(None)
    expected = {"missing": "there is no checkpoint", "damaged": "array 'w'", "none": "start it with --snapshots DIR"}
    assert expected[harm] in other.failure(LoadState(2 if harm == "missing" else 1, 1))
    assert not other.runs.cancelled
    same(task, {"count": jnp.int32(9)})


def test_a_variable_of_another_type_is_refused(tmp_path: Path) -> None:
    task, other = Task(tmp_path), Task(tmp_path)
    task.create()
    task.do(CaptureState(1))
    other.store.create("w", ArrayType(np.dtype("float32"), ()), lambda: jnp.zeros(()))
    assert "variable 'w' holds f32[], and the snapshot has f32[2,3]" in other.failure(LoadState(1, 1))
