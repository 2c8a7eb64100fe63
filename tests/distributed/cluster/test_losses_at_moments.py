"""A parameter task is lost at a named moment of a worker: training goes on, and each step is applied once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.snapshots.recovery import Recovery
from dflow.distributed.snapshots.snapshot_schedule import SnapshotSchedule
from dflow.distributed.steps.step_gate import is_in_step
from dflow.tracing import moments
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.waiting import until

pytestmark = pytest.mark.once

STEPS = 12
#: Longest time of a program. A wait for a return that waits for the program would be longer.
DEADLINE_S = 60.0


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    running = Tasks(tmp_path, every_s=0.05)
    yield running
    running.close()


class Loss:
    """Ends a parameter task when the worker reaches a moment, at its `count`th time since `arm`.

    The task is started again, as an empty process, when the worker waits for that.
    """

    def __init__(self, tasks: Tasks, moment: str, count: int = 1, index: int = 0) -> None:
        self._tasks, self._moment, self._left, self._index = tasks, moment, count, index
        self._is_armed = False

    def arm(self) -> None:
        self._tasks.await_new_snapshot()
        self._is_armed = True

    def __call__(self, moment: str, task: str) -> None:
        if not self._is_armed or moment != self._moment or "/job:ps" in task or task == "coordinator":
            return
        self._left -= 1
        if self._left == 0:
            self._tasks.ps[self._index].close()
            threading.Thread(target=self._start_again).start()

    def _start_again(self) -> None:
        until(lambda: bool(self._tasks.coordinator._state.core.part(Recovery)._asks))
        self._tasks.ps[self._index] = self._tasks.start(self._index)

    def check(self) -> None:
        assert self._left <= 0, f"the worker did not reach {self._moment!r}"
        assert self._tasks.worker.steps.epoch == 1


@pytest.fixture
def lost(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loss]:
    def lost(moment: str, **which: int) -> Loss:
        loss = Loss(tasks, moment, **which)
        monkeypatch.setattr(moments, "hook", loss)
        return loss

    return lost


def in_time(do: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result(DEADLINE_S)


def counts(tasks: Tasks, name: str = "count") -> list[dflow.Variable]:
    """A variable on each parameter task, with an element for each step."""
    made = []
    with tasks.worker.parameter_servers():
        for index in range(2):
            with dflow.device(f"ps:{index}"):
                made.append(dflow.Variable(lambda: jnp.zeros(STEPS), name=f"{name}{index}"))
    return made


def training(tasks: Tasks) -> tuple[list[dflow.Variable], Callable[..., Any]]:
    """Variables on both tasks, and a step that sets the element of its number to 1, with slots of an optimizer."""
    made = counts(tasks, "w")
    with tasks.worker.parameter_servers():
        optimizer = dflow.Optimizer(optax.sgd(1.0, momentum=0.0), made, name="sgd")

    @dflow.jit
    def step(numbers: jax.Array) -> None:
        optimizer.apply([-jnp.zeros(STEPS).at[jnp.ravel(numbers)[0]].set(1.0) for _ in made])

    return made, step


def trained_once(tasks: Tasks, strategy: Any, step: Callable[..., Any], batch: Any, made: list[dflow.Variable]) -> None:
    in_time(lambda: list(strategy(tasks.worker).run(step, batch, steps=STEPS, name="run")))
    for variable in made:
        np.testing.assert_array_equal(variable.read(), np.ones(STEPS))


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_evaluation_captures_the_values_again(tasks: Tasks, lost: Callable[..., Loss], is_shared: bool) -> None:
    made, loss = counts(tasks), lost("pause")
    shared = {"cluster": tasks.worker, "name": "evaluation"} if is_shared else {}
    loss.arm()
    found = in_time(
        lambda: dflow.evaluate(lambda x: jnp.mean(x) + made[0].read()[0], [np.ones(4), np.ones(2)], **shared)
    )
    assert found == {"loss": 1.0, "examples": 6}
    loss.check()


def a_snapshot(tasks: Tasks) -> None:
    tasks.await_new_snapshot()


def a_return(tasks: Tasks) -> None:
    tasks.start_again(0)
    until(lambda: tasks.worker.steps.epoch == 1)


@pytest.mark.filterwarnings("ignore:step is traced and compiled again during a run:dflow.RetraceWarning")
@pytest.mark.parametrize("overtaken_by", [a_snapshot, a_return])
@pytest.mark.parametrize(("moment", "strategy"), [("first call", Sync), ("new trace", Async), ("registration", Sync)])
def test_a_trace_and_a_compilation_hold_up_no_pause(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, moment: str, overtaken_by: Callable[[Tasks], None], strategy: Any
) -> None:
    """A snapshot, or a return to one, begins and ends while a step is traced."""
    (made, step), left = training(tasks), [moment]

    def reached(moment: str, task: str) -> None:
        if is_in_step() and moment in left:
            left.remove(moment)
            overtaken_by(tasks)

    monkeypatch.setattr(moments, "hook", reached)
    tasks.await_new_snapshot()
    batch = lambda number: jnp.full(1 + 2 * number // STEPS, number)  # noqa: E731
    trained_once(tasks, strategy, step, batch, made)
    assert not left


@pytest.mark.parametrize("strategy", [Async, Sync])
def test_a_task_is_lost_before_the_first_snapshot_is_complete(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    """All that was made and done is made and done again, in the same processes."""
    monkeypatch.setattr(SnapshotSchedule, "is_due", lambda *_: False)
    (made, step), kills = training(tasks), [3, 7]

    def batch(number: int) -> Any:
        if number in kills:
            kills.remove(number)
            tasks.start_again(number // 7)
        return jnp.int32(number)

    trained_once(tasks, strategy, step, batch, made)
    assert (kills, tasks.worker.steps.epoch) == ([], 2)


@pytest.mark.parametrize("strategy", [Async, Sync])
@pytest.mark.parametrize("moment", ["creation", "registration"])
def test_a_task_that_cannot_be_reached_after_the_return_is_tried_again(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, strategy: Any, moment: str
) -> None:
    """The worker is cut off as it makes again the state that the return has freed, or registers its plans again."""
    monkeypatch.setattr(SnapshotSchedule, "is_due", lambda *_: False)
    (made, step), left = training(tasks), [moment, moment]

    def cut_off(reached: str, task: str) -> None:
        if tasks.worker.steps.epoch and reached in left:
            left.remove(reached)
            raise dflow.TaskLost("/job:ps/task:0 could not be reached")

    def batch(number: int) -> Any:
        if number == 3 and not tasks.worker.steps.epoch:
            monkeypatch.setattr(moments, "hook", cut_off)
            tasks.start_again(0)
        return jnp.int32(number)

    trained_once(tasks, strategy, step, batch, made)
    assert (left, tasks.worker.steps.epoch) == ([], 1)


def test_plans_that_a_return_outside_of_a_step_overtakes_are_registered_again(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made, step), steps = training(tasks), tasks.worker.steps
    tasks.await_new_snapshot()
    register = steps._registered

    def overtaken(parts: Any) -> dict[str, int]:
        handles = register(parts)
        monkeypatch.setattr(steps, "_registered", register)
        tasks.start_again(0)
        until(lambda: tasks.worker.steps.epoch == 1)
        return handles

    monkeypatch.setattr(steps, "_registered", overtaken)
    in_time(lambda: step(jnp.full(1, 5)))
    assert [float(variable.read()[5]) for variable in made] == [1.0, 1.0]


def test_a_wait_for_a_return_does_not_keep_a_step_of_another_thread_from_ending(
    tasks: Tasks, lost: Callable[..., Loss]
) -> None:
    """One thread waits for the return with a batch of variables, and the return waits for a step that uses one."""
    counts(tasks)
    loss = lost("creation")
    loss.arm()
    with ThreadPoolExecutor(1) as pool, tasks.worker.parameter_servers():
        variable = dflow.Variable(1.0, name="late")
        with tasks.worker.server.gate.step(DEADLINE_S):
            reading = pool.submit(variable.read)
            until(lambda: bool(tasks.coordinator._state.core.part(Recovery)._asks))
            with pytest.raises(dflow.TaskLost):
                variable.read()
        assert float(reading.result(DEADLINE_S)) == 1.0
    loss.check()


@pytest.mark.parametrize("moment", ["pause", "save"])
def test_a_save_whose_task_is_lost_leaves_the_checkpoint_before(
    tasks: Tasks, lost: Callable[..., Loss], tmp_path: Path, moment: str
) -> None:
    made, folder = counts(tasks), tmp_path / "checkpoints"
    manager = dflow.CheckpointManager(folder, made, every=1)
    manager.save(0)
    manager.wait()
    made[1].assign(jnp.ones(STEPS))
    loss = lost(moment)
    loss.arm()

    def save() -> str:
        try:
            manager.save(1)
            manager.wait()
        except dflow.DflowError as error:
            return str(error)
        return ""

    error = in_time(save)
    assert ("ps" in error, [one.step for one in manager.checkpoints]) in ((True, [0]), (False, [0, 1]))
    in_time(tasks.worker.steps.await_recovery)
    loss.check()
    manager.save(2)
    manager.close()
    assert not [*folder.glob(".step_*")]
    dflow.restore(folder / "step_2", made)
    np.testing.assert_array_equal(made[1].read(), np.ones(STEPS))
    dflow.restore(folder / "step_0", made)
    np.testing.assert_array_equal(made[1].read(), np.zeros(STEPS))


def test_an_export_whose_task_is_lost_is_whole(tasks: Tasks, lost: Callable[..., Loss], tmp_path: Path) -> None:
    made, loss = counts(tasks), lost("export")
    exported = dflow.export(dflow.jit(lambda x: x + made[0] + made[1]), jax.ShapeDtypeStruct((STEPS,), jnp.float32))
    loss.arm()
    in_time(lambda: exported.save(tmp_path / "export"))
    np.testing.assert_array_equal(dflow.load(tmp_path / "export", prefix="loaded/")(np.ones(STEPS)), np.ones(STEPS))
    in_time(tasks.worker.steps.await_recovery)
    loss.check()


def test_a_save_within_a_step_is_refused(tasks: Tasks, tmp_path: Path) -> None:
    made = counts(tasks)

    def step(number: Any) -> None:
        dflow.save(tmp_path / "saved", made)

    with pytest.raises(dflow.StrategyError, match=r"a save: expected between two steps of a run, got within one"):
        next(Async(tasks.worker).run(step, [1], steps=1, name="run"))
