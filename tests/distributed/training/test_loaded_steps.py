"""Loaded training steps under strategies: `Async` runs them over variables on tasks, other strategies refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.tracing.errors import StrategyError, VariableError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    w = dflow.Variable(lambda: jnp.ones(4), name="w")
    optimizer = dflow.Optimizer(optax.sgd(0.5), [w], name="opt")

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: jnp.sum(x * w), [w])()
        optimizer.apply(gradients)
        return value

    return dflow.export(step, jax.ShapeDtypeStruct((4,), jnp.float32)).save(tmp_path / "step")


def run(kind: str, worker: Cluster, step: Any) -> list[float]:
    strategy = getattr(dflow.distributed, kind)(worker)
    return [float(one) for one in strategy.run(step, [np.ones(4, np.float32)] * 2, steps=2, name=f"{kind} loaded")]


def test_steps_of_variables_of_this_process_are_refused(worker: Cluster, path: Path) -> None:
    loaded = dflow.load(path)
    loaded(np.ones(4, np.float32))  # outside of a strategy they may be trained, and are traced
    fact = r"'w', which the loaded function 'step' trains, lives in this process(.|\n)*load it within cluster.param"
    with pytest.raises(VariableError, match=fact):
        run("Async", worker, loaded)


def test_steps_of_variables_of_tasks_are_for_async(worker: Cluster, path: Path) -> None:
    with worker.parameter_servers():
        loaded = dflow.load(path)
    for step, fact in (
        (loaded, r"got a Loaded(.|\n)*train by Async"),
        (dflow.jit(lambda x: loaded(x) + 0), r"gives gradients 0 times \(to none\)(.|\n)*train by Async"),
    ):
        with pytest.raises(StrategyError, match=fact):
            run("Sync", worker, step)
    assert run("Async", worker, loaded) == [4, 2]
