"""Workers of one run whose steps write different variables, or update by different rules: all workers get an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.tracing.errors import StrategyError
from tests.distributed.training.sync_programs import together

# The workers are threads of this process.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")
STRATEGIES: Any = {"Async": dflow.distributed.Async, "Sync": dflow.distributed.Sync}


def step_of(cluster: Cluster, run: str, *, name: str = "w", rate: float = 0.1, noise: int = 0) -> Callable[[Any], Any]:
    with cluster.parameter_servers():
        w = dflow.Variable(lambda: jnp.ones(4), name=f"{run}/{name}")
        optimizer = dflow.Optimizer(optax.sgd(rate), [w], name=f"{run}/opt")
    key = jax.random.key(noise)

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: jnp.mean((w * x + jax.random.normal(key, (4,))) ** 2), [w])()
        optimizer.apply(gradients)
        return value

    return step


@pytest.mark.parametrize(
    ("kind", "differs", "shown"),
    [
        ("Async", lambda index: {"name": f"w{index}"}, r"worker:\d: variable .*w\d' f32\[4\]\n +worker:\d: var.*w\d'"),
        (
            "Sync",
            lambda index: {"rate": 0.1 * (index + 1)},
            r"worker:\d: setting .*: -0\.\d\n +worker:\d: setting .*-0\.\d",
        ),
    ],
    ids=["names", "rates"],
)
def test_unequal_workers_are_all_refused_with_both_sides_shown(
    workers: list[Cluster], kind: str, differs: Callable[[int], Any], shown: str
) -> None:
    def refused(index: int, cluster: Cluster) -> None:
        step = step_of(cluster, "run", **differs(0 if index == 2 else index))
        batches = (jnp.ones(4) for _ in range(10_000))
        with pytest.raises(StrategyError, match=rf"run 'run': expected steps that write the same(.|\n)*{shown}"):
            list(STRATEGIES[kind](cluster).run(step, batches, steps=10_000, name="run"))

    together(workers, refused)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_constants_may_differ(workers: list[Cluster], kind: str) -> None:
    def work(index: int, cluster: Cluster) -> int:
        step = step_of(cluster, f"{kind} noise", noise=index)
        return sum(1 for _ in STRATEGIES[kind](cluster).run(step, lambda _: jnp.ones(4), steps=6, name=f"{kind} noise"))

    assert sum(together(workers, work)) == (6 if kind == "Async" else 18)
