"""Steps of several workers, as each traces them: equal or refused, compiled once, one optimizer a function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.calls.trace_log import _LOOK
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import memory_cluster
from dflow.tracing.errors import StrategyError
from tests.distributed.training.sync_programs import SOON, Sync, together

# The workers are threads of this process.
pytestmark = pytest.mark.filterwarnings(
    "ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning",
    "ignore:.* is traced and compiled again during a run:dflow.RetraceWarning",  # of short batches
)
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


# The log of a step's traces under a strategy: a step is compiled once, and each trace has its own, true reason.


#: Whether the trace is a look of the strategy, and its reason.
LOOK, RUN = (True, (_LOOK,)), (False, ("first trace",))


def traces(cluster: Cluster, strategy: str, backup_workers: int | None) -> list[list[tuple[bool, Any]]]:
    """Run a step that calls a function; return the traces of both."""
    given = {} if backup_workers is None else {"backup_workers": backup_workers}
    chosen = getattr(dflow.distributed, "Async" if strategy == "Async" else "Sync")(cluster, **given)
    with chosen.variables():
        table = dflow.Embedding(8, 2, name="table")
        optimizer = dflow.Optimizer(optax.sgd(0.1), [table], name="opt")

    @dflow.jit
    def inner(ids: Any) -> Any:
        return ids % 8

    @dflow.jit
    def step(ids: Any) -> Any:
        places = inner(ids)
        loss, gradients = dflow.value_and_grad(lambda: table(places).sum(), optimizer.variables)()
        optimizer.apply(gradients)
        return {"loss": loss}

    def batch(number: int) -> Any:
        return np.arange(4, dtype=np.int32) + number

    if strategy == "Trainer":
        dflow.Trainer(step, chosen).run(batch, steps=4)
    else:
        list(chosen.run(step, batch, steps=4, name="run"))
    return [[(one.is_look, one.changes) for one in function.trace_log()] for function in (step, inner)]


@pytest.mark.parametrize(("strategy", "backup_workers"), [("Async", None), ("Sync", 1), ("Trainer", None)])
def test_a_step_has_one_trace_that_runs(strategy: str, backup_workers: int | None) -> None:
    expected = [RUN] if strategy == "Async" else [LOOK, RUN]
    with (
        memory_cluster(ps=1, workers=2) as memory,
        closing(memory.worker(0, SOON)) as one,
        closing(memory.worker(1, SOON)) as two,
    ):
        found = together([one, two], lambda index, cluster: traces(cluster, strategy, backup_workers))
    # A worker that comes when the others have done all steps traces nothing, or only looks.
    assert all(log == expected[: len(log)] for logs in found for log in logs)
    assert [expected, expected] in found


# Synchronous steps that call several compiled functions, each with its own optimizer.


ROWS = 6


class Pair:
    """A critic of dense weights and a table, each with an optimizer, trained by functions that `compiled` makes."""

    def __init__(self, cluster: Cluster, prefix: str, compiled: Callable[..., Any]) -> None:
        with cluster.parameter_servers():
            self.w = dflow.Variable(lambda: jnp.arange(3.0), name=f"{prefix}/w")
            self.table = dflow.Variable(lambda: jnp.ones((ROWS, 3)), name=f"{prefix}/table")
            of_w = dflow.Optimizer(optax.sgd(0.1), [self.w], name=f"{prefix}/of w")
            of_table = dflow.Optimizer(optax.sgd(0.1), [self.table], name=f"{prefix}/of table")

        @compiled
        def critic(x: Any, scale: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: scale * jnp.sum(self.w * x), [self.w])()
            of_w.apply(gradients)
            return value

        @compiled
        def generator(ids: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: jnp.sum(self.table[ids] * self.w), [self.table])()
            of_table.apply(gradients)
            return {"of the generator": value}

        @dflow.jit
        def step(x: Any, ids: Any) -> Any:
            return {"loss": critic(x, 0.5) + generator(ids)["of the generator"]}

        self.step = step


def batch_of(index: int, number: int) -> tuple[Any, Any]:
    """A worker's batch; its numbers of rows differ, so that the step is traced twice."""
    return np.full(3, index + 1, np.float32), np.arange(2 + number % 2, dtype=np.int32) + index


def expected(steps: int) -> tuple[Any, Any]:
    w, table = np.arange(3.0), np.ones((ROWS, 3))
    for number in range(steps):
        of_w, of_table = np.zeros(3), np.zeros((ROWS, 3))
        for x, ids in (batch_of(index, number) for index in range(3)):
            of_w += 0.5 * x / 3
            np.add.at(of_table, ids, w / 3)
        w, table = w - 0.1 * of_w, table - 0.1 * of_table
    return w, table


def test_each_function_gives_gradients_to_its_own_optimizer(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> tuple[Any, Any]:
        pair = Pair(cluster, "pair", dflow.jit)
        batches = (batch_of(index, number) for number in range(4))
        assert len(list(Sync(cluster).run(pair.step, batches, steps=4, name="pair"))) == 4
        return np.asarray(pair.w.read()), np.asarray(pair.table.read())

    for w, table in together(workers, work):
        np.testing.assert_allclose(w, expected(4)[0], rtol=1e-6)
        np.testing.assert_allclose(table, expected(4)[1], rtol=1e-6)


def test_functions_that_another_transformation_traces_are_refused(workers: list[Cluster]) -> None:
    pair = Pair(workers[0], "refused", jax.jit)
    fact = (
        r"step gives gradients to 'refused/of w', 'refused/of table' in several functions(.|\n)*by dflow.jit in place"
    )
    with pytest.raises(StrategyError, match=fact):
        list(Sync(workers[0]).run(pair.step, [batch_of(0, 0)], steps=1, name="refused"))
