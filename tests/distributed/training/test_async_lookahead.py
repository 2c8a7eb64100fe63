"""Lookups of a worker's next batch that are under way while its present step runs, by `Async(lookahead=True)`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.steps.task_channel import TaskChannel
from dflow.testing import MemoryCluster
from dflow.tracing.errors import InputError
from tests.distributed.training.sync_programs import nothing_is_left, together
from tests.distributed.waiting import until
from tests.effort import examples

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("no_pause_is_long")]

ROWS, IDS = 10, 4
#: Steps of a run that ends with its batches, before the worker's first claim does.
MANY = 1000
Batch = tuple[Any, Any]


class Messages:
    """The values that the tasks of a cluster in this process send and take in, in order.

    Made before the cluster, it sees all of them. Before a worker sends gradients, `held` is called with the number of
    the step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, str]] = []
        self.held: Callable[[int], None] = lambda number: None
        send, arrived = TaskChannel.send, TaskChannel.arrived

        def sends(channel: TaskChannel, step: Any, edge: str, *rest: Any) -> None:
            if edge.startswith("grad/"):
                self.held(step.number)
            self.seen.append(("sent", step.number, edge))
            send(channel, step, edge, *rest)

        def arrives(channel: TaskChannel, message: Any, *rest: Any) -> None:
            arrived(channel, message, *rest)
            self.seen.append(("arrived", message.step, message.edge))

        monkeypatch.setattr(TaskChannel, "send", sends)
        monkeypatch.setattr(TaskChannel, "arrived", arrives)

    def has(self, what: str, number: int, edges: Sequence[str]) -> bool:
        return {(what, number, edge) for edge in edges} <= {*self.seen}

    def first(self, what: str, number: int, part: str) -> int:
        return next(
            (at for at, (how, of, edge) in enumerate(self.seen) if (how, of) == (what, number) and part in edge), 0
        )


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    return Messages(monkeypatch)


def model(cluster: Cluster, name: str = "table") -> tuple[dflow.Embedding, Callable[..., Any]]:
    """A table, and a step that moves rows towards targets and returns the rows that it looked up."""
    with cluster.parameter_servers():
        table = dflow.Embedding(ROWS, 2, name=name, by="modulo", initializer=lambda key, shape, dtype: jnp.zeros(shape))
        optimizer = dflow.Optimizer(optax.sgd(0.5), [table], name=f"sgd of {name}")

    @dflow.jit
    def step(ids: Any, targets: Any) -> Any:
        def loss() -> Any:
            rows = table(ids)
            return ((rows - targets) ** 2).sum() / 2, rows

        (_, rows), gradients = dflow.value_and_grad(loss, [table], has_aux=True)()
        optimizer.apply(gradients)
        return rows

    return table, step


def drawn(count: int, seed: int = 0, ids: int = IDS) -> list[Batch]:
    draw = np.random.default_rng(seed)
    return [
        (draw.integers(0, ROWS, ids).astype(np.int32), draw.integers(-4, 5, (ids, 2)).astype(np.float32))
        for _ in range(count)
    ]


def updated(table: Any, ids: Any, gradients: Any) -> Any:
    after = table.copy()
    np.subtract.at(after, ids, 0.5 * gradients)
    return after


def expected(batches: Sequence[Batch], lacks: Sequence[int]) -> tuple[list[Any], Any]:
    """The rows that each step looks up, which lack the newest updates, and the table at the end, by NumPy alone."""
    versions, found = [np.zeros((ROWS, 2), np.float32)], []
    for number, (ids, targets) in enumerate(batches):
        rows = versions[number - lacks[number]][ids]
        found.append(rows)
        versions.append(updated(versions[-1], ids, rows - targets))
    return found, versions[-1]


IDS_EDGES = ("table/0/ids", "table/1/ids")
ROWS_EDGES = ("table/0_1", "table/1_1")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_lookup_of_the_next_batch_is_under_way_before_the_gradient_leaves(
    messages: Messages, memory: MemoryCluster, worker: Cluster, prefetch: int
) -> None:
    table, step = model(worker)
    batches, numbers = drawn(14), []
    awaited = ROWS_EDGES if prefetch else IDS_EDGES

    def held(number: int) -> None:
        """The gradients of a step leave when the next batch's ids are at the tables, or its rows are here."""
        numbers.append(number)
        if messages.has("sent", number + 1, IDS_EDGES):
            until(lambda: messages.has("arrived", number + 1, awaited))

    messages.held = held
    run = Async(worker, prefetch=prefetch, lookahead=True).run(step, iter(batches), steps=MANY)
    found = [np.asarray(rows) for rows in run]
    numbers = [*dict.fromkeys(numbers)]
    early = [messages.first("sent", n, "/ids") < messages.first("sent", n - 1, "grad/") for n in numbers]
    # The first iteration shows what the step is.
    assert early == [False] * 2 + [True] * 12
    rows, after = expected(batches, [int(one and prefetch > 0) for one in early])
    np.testing.assert_array_equal(found, rows)
    np.testing.assert_array_equal(table.read(), after)
    until(lambda: nothing_is_left(memory, worker))


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step run, whether the worker's part of it had begun before its call."""
    found: list[bool] = []
    run = ClusterSteps._run

    def noted(self: ClusterSteps, step: Any, called: Any, leaves: Any, begun: Any, loop: Any) -> Any:
        found.append(begun is not None and begun.leaves is not None)
        return run(self, step, called, leaves, begun, loop)

    monkeypatch.setattr(ClusterSteps, "_run", noted)
    return found


BATCHES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([IDS, IDS, IDS, 2])), min_size=3, max_size=9)


@pytest.mark.filterwarnings("ignore:.* is traced and compiled again during a run:dflow.RetraceWarning")
def test_each_lookup_sees_its_workers_updates_except_the_newest_one(worker: Cluster, fed: list[bool]) -> None:
    table, step = model(worker)

    @given(BATCHES, st.sampled_from([0, 0, 1, 2]))
    @settings(max_examples=examples(16), deadline=None)
    def check(sizes: list[tuple[int, int]], prefetch: int) -> None:
        table.assign(jnp.zeros(table.shape))
        batches = [drawn(1, seed, size)[0] for seed, size in sizes]
        run = Async(worker, prefetch=prefetch, lookahead=True).run(step, iter(batches), steps=MANY)
        versions = [np.zeros((ROWS, 2), np.float32)]
        for (ids, targets), rows in zip(batches, run, strict=True):
            seen = [version[ids] == rows for version in versions[-1 - min(prefetch, 1) :]]
            assert np.logical_or.reduce(seen).all()
            versions.append(updated(versions[-1], ids, np.asarray(rows) - targets))
        np.testing.assert_array_equal(table.read(), versions[-1])

    check()
    assert any(fed)


def test_a_wrong_id_is_an_error_of_its_own_step_and_changes_nothing(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        count = dflow.Variable(0, name="count")
    table, step = model(worker)

    @dflow.jit
    def counted(ids: Any, targets: Any) -> Any:
        count.assign_add(1)
        return step(ids, targets)

    batches = drawn(10)
    batches[6][0][2] = ROWS
    run = Async(worker, lookahead=True).run(counted, iter(batches), steps=MANY)
    found = list(itertools.islice(run, 6))
    with pytest.raises(InputError, match=rf"table 'table': expected ids from 0 to {ROWS - 1}, got {ROWS} at \(2,\)"):
        next(run)
    rows, after = expected(batches[:6], [0] * 6)
    np.testing.assert_array_equal(found, rows)
    np.testing.assert_array_equal(table.read(), after)
    assert int(count.read()) == 6
    until(lambda: nothing_is_left(memory, worker))


def test_variables_of_the_worker_are_those_of_the_call(worker: Cluster, fed: list[bool]) -> None:
    table, _ = model(worker)
    mine = dflow.Variable(0.0, name="mine")

    @dflow.jit
    def step(ids: Any) -> Any:
        before = mine.read()
        mine.assign_add(1.0)
        table.scatter_add(ids, table(ids) * 0 + before)
        return before

    run = Async(worker, prefetch=1, lookahead=True).run(step, (ids for ids, _ in drawn(8)), steps=MANY)
    assert list(map(float, run)) == list(range(8))
    assert sum(fed) == 6


def test_a_lookup_stays_within_the_bound_of_staleness(workers: list[Cluster], fed: list[bool]) -> None:
    limit = 12

    def train(worker: Cluster) -> list[int]:
        with worker.parameter_servers():
            version = dflow.ShardedVariable(lambda: jnp.zeros((4, 1)), name="version")

        @dflow.jit
        def step(row: Any) -> Any:
            seen = version.gather(row)
            version.scatter_add(row, 1 + 0 * seen)
            return (version.gather(row) - 1 - seen)[0, 0]

        strategy = Async(worker, prefetch=1, lookahead=True, max_staleness=limit)
        run = strategy.run(step, itertools.repeat(np.array([1])), steps=90, name="bounded")
        return [int(missed) for missed in run]

    assert max(itertools.chain(*together(workers, lambda _, worker: train(worker)))) <= limit
    assert any(fed)


def other_arrays(step: Callable[..., Any], worker: Cluster) -> Callable[..., Any]:
    return lambda ids, targets: step(jnp.asarray(ids), targets)


def donates(step: Callable[..., Any], worker: Cluster) -> Callable[..., Any]:
    return dflow.jit(step, donate_argnums=1)


def own_ids(step: Callable[..., Any], worker: Cluster) -> Callable[..., Any]:
    shift = dflow.Variable(0, name="shift")
    return dflow.jit(lambda ids, targets: step(ids + shift.read(), targets))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (other_arrays, "the function is called with other arrays than those of the batch"),
        (donates, "the function donates arguments"),
        (own_ids, "the function sends nothing that its arguments alone determine, such as the ids of a lookup"),
    ],
)
def test_where_lookahead_has_no_effect_that_is_logged(
    worker: Cluster,
    fed: list[bool],
    caplog: pytest.LogCaptureFixture,
    made: Callable[[Callable[..., Any], Cluster], Callable[..., Any]],
    why: str,
) -> None:
    _, step = model(worker)
    with caplog.at_level(logging.WARNING, "dflow"):
        assert len(list(Async(worker, lookahead=True).run(made(step, worker), iter(drawn(6)), steps=MANY))) == 6
    assert not any(fed)
    messages = [record.getMessage() for record in caplog.records if "lookahead" in record.getMessage()]
    assert messages == [f"lookahead=True has no effect: {why}"]
