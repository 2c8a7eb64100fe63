"""Tables on tasks and dense layers in the workers: the end of a run whose tables have returned to a snapshot."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import optax
import pytest

import dflow
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.collectives.dense_gradients import DenseGradients
from dflow.distributed.synchronous import hybrid, round_part
from dflow.distributed.synchronous.round_messages import RoundOpen
from dflow.distributed.training.open_runs import OpenRuns
from dflow.tracing.errors import DflowError, StrategyError, TaskLost


class Group:
    number, names = 1, ("worker:0",)

    def exchange(self, point: str, word: str) -> tuple[str]:
        return (word,)

    def computing(self) -> Any:
        return nullcontext()


class Part:
    """A worker's part in the rounds of a run; `step` is called in step 2; the tables may return in it."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.left: list[int] = []
        self.kept: list[Any] = []
        self.run = ""

    def open(self, *given: Any) -> Any:
        return self

    def next(self, done: int) -> RoundOpen:
        return RoundOpen(done + 1, done + 1)

    def run_step(self, gradients: Any, step: Any, batch: Any, opening: RoundOpen) -> tuple[Any, bool]:
        if opening.number == 2:
            self._step()
        return batch, True

    def leave(self, done: int) -> None:
        self.left.append(done)


def run(monkeypatch: pytest.MonkeyPatch, step: Any, cluster_id: str = "c") -> tuple[Any, Part, list[int]]:
    """Return a loop of 5 steps, its part, and the steps whose means were applied; `step` gets the cluster."""
    alone: Any = dflow.connect()
    applied: list[int] = []
    dense = SimpleNamespace(apply_means=lambda kept: applied.append(len(applied)))
    cluster: Any = SimpleNamespace(
        is_standalone=False,
        store=alone.store,
        task=alone.task,
        identity=(cluster_id, alone.task),
        coordinator=SimpleNamespace(tell=lambda message: None),
        steps=SimpleNamespace(undone=0, epoch=3),
    )
    group = SimpleNamespace(group=Group(), programs=None)
    parts = {OpenRuns: OpenRuns(cluster), DenseGradients: dense, Collectives: group}
    cluster.part = parts.__getitem__
    part = Part(lambda: step(cluster))

    def round_part(cluster: Any, run: str, *given: Any) -> Part:
        part.run = run
        return part

    monkeypatch.setattr(hybrid, "RoundPart", round_part)
    strategy = dflow.distributed.Hybrid(cluster)
    return strategy.run(lambda x: x, lambda x: x, steps=5, name="run"), part, applied


def test_a_job_that_goes_on_from_a_snapshot_has_rounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for cluster in ("first", "second", "second"):
        loop, part, _ = run(monkeypatch, lambda cluster: (0.0, None), cluster)
        next(loop)
        loop.close()
        names.append(part.run)
    assert names[0] != names[1] == names[2]


def returned(cluster: Any) -> None:
    cluster.steps.epoch += 1


def failed_after_a_return(cluster: Any) -> None:
    cluster.steps.epoch += 1
    raise DflowError("no resource 'table's/gradients' is held here")


@pytest.mark.parametrize("step", [returned, failed_after_a_return])
def test_a_return_of_the_tables_ends_the_run(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, part, applied = run(monkeypatch, step)
    fact = r"the tables of run 'run' have returned to a snapshot, and the dense layers have not(.|\n)*start the workers"
    with pytest.raises(TaskLost, match=fact) as raised:
        list(steps)
    assert (applied, part.left) == ([0, 1], [2])
    cause = raised.value.__cause__
    assert cause is None or "no resource" in str(cause)


def failed(cluster: Any) -> None:
    raise StrategyError("of the step")


def test_an_error_without_a_return_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyError, match="of the step"):
        list(run(monkeypatch, failed)[0])


def test_a_step_without_a_table_is_refused_with_the_reason() -> None:
    w = dflow.Variable(1.0, name="dense alone")
    optimizer = dflow.Optimizer(optax.sgd(0.1), [w], name="of dense alone")
    step = dflow.jit(lambda x: optimizer.apply([x]))
    dense = SimpleNamespace(takes=lambda optimizer: True)
    fact = r"expected gradients for a table on parameter tasks, got none beside those of of dense alone(.|\n)*AllReduce"
    with pytest.raises(StrategyError, match=fact):
        round_part._look(step, [1.0], dense)  # type: ignore[arg-type]
