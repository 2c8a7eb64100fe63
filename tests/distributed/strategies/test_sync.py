"""Synchronous training over a cluster in this process: one process's weights, whoever is slow, dies or has no data."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.strategies import round_part
from dflow.distributed.worker.cluster import Cluster, ClusterSettings
from dflow.distributed.worker.standalone import Alone
from dflow.lowering.queues.channel import StepId
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import DeadlineExceeded, DflowError, RemoteError, StrategyError, TaskLost, VariableError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.ir.wire_codecs import decoded, encoded

DEADLINE_S = 60.0
SOON = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=30.0)
Sync = dflow.distributed.Sync


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[list[Cluster]]:
    with (
        closing(memory.worker(0, SOON)) as a,
        closing(memory.worker(1, SOON)) as b,
        closing(memory.worker(2, SOON)) as c,
    ):
        yield [a, b, c]


def together(workers: Sequence[Any], work: Callable[[int, Any], Any]) -> list[Any]:
    """Do the work of every worker at once; what each gave."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return [done.result(DEADLINE_S) for done in [pool.submit(work, *pair) for pair in enumerate(workers)]]


# The weights of one process.


def mlp(cluster: Cluster | Alone, transformation: Any, prefix: str) -> tuple[Any, Any, Any]:
    """A model of two layers: its variables, their optimizer and a step."""
    with cluster.parameter_servers():
        key = jax.random.key(0)
        model = dflow.variables(
            {
                "hidden": lambda: jax.random.normal(key, (4, 8)) / 2,
                "bias": lambda: jnp.zeros(8),
                "out": lambda: jax.random.normal(key, (8, 1)),
            },
            prefix=f"{prefix}/",
        )
        optimizer = dflow.Optimizer(transformation, model, name=f"{prefix}/opt")

    @dflow.jit
    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return jnp.mean((jax.nn.tanh(x @ model["hidden"] + model["bias"]) @ model["out"] - y) ** 2)

        value, gradients = dflow.value_and_grad(loss, model)()
        optimizer.apply(gradients)
        return {"loss": value}

    return model, optimizer, step


def embedding(cluster: Cluster | Alone, transformation: Any, prefix: str) -> tuple[Any, Any, Any]:
    """A table of which each step looks up few rows, and a layer."""
    with cluster.parameter_servers():
        model = dflow.variables(
            {"table": lambda: jax.random.normal(jax.random.key(1), (50, 3)), "out": lambda: jnp.ones((3, 1))},
            prefix=f"{prefix}/",
        )
        optimizer = dflow.Optimizer(transformation, model, name=f"{prefix}/opt")

    @dflow.jit
    def step(rows: Any, y: Any) -> Any:
        def loss() -> Any:
            return jnp.mean((model["table"][rows] @ model["out"] - y) ** 2)

        value, gradients = dflow.value_and_grad(loss, model)()
        optimizer.apply(gradients)
        return value

    return model, optimizer, step


ROUNDS, EACH = 5, 4


def numbers(prefix: str) -> list[tuple[Any, Any]]:
    """The batches of all workers, side by side."""
    drawn = np.random.default_rng(0)
    x = [drawn.normal(size=(3, EACH, 4)).astype(np.float32) for _ in range(ROUNDS)]
    rows = [drawn.integers(0, 50, size=(3, EACH)).astype(np.int32) for _ in range(ROUNDS)]
    y = [drawn.normal(size=(3, EACH, 1)).astype(np.float32) for _ in range(ROUNDS)]
    return list(zip(x if prefix == "mlp" else rows, y, strict=True))


@pytest.mark.parametrize(
    ("make", "transformation"),
    [
        (mlp, lambda: optax.sgd(0.1, momentum=0.9)),
        (mlp, lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
        (embedding, lambda: optax.sgd(0.1)),
        (embedding, lambda: optax.adam(1e-2)),
        (embedding, lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))),
    ],
    ids=["momentum", "clipped adamw", "rows sgd", "rows adam", "rows clipped momentum"],
)
def test_three_workers_have_the_weights_of_one_process_on_all_their_batches(
    workers: list[Cluster], make: Callable[..., Any], transformation: Callable[[], Any]
) -> None:
    batches = numbers(make.__name__)

    def work(index: int, cluster: Cluster) -> Any:
        model, optimizer, step = make(cluster, transformation(), "together")
        mine = [(x[index], y[index]) for x, y in batches]
        strategy = Sync(cluster)
        outcomes = list(strategy.run(step, mine, steps=ROUNDS, name="run"))
        assert (len(outcomes), strategy.accepted, strategy.dropped) == (ROUNDS, ROUNDS, 0)
        return jax.device_get(dflow.read(model)), jax.device_get(dflow.read(optimizer.slots))

    found = together(workers, work)
    model, optimizer, step = make(Alone(), transformation(), "alone")
    for x, y in batches:
        step(np.concatenate(x), np.concatenate(y))
    wanted = jax.device_get(dflow.read(model)), jax.device_get(dflow.read(optimizer.slots))
    for each in found:
        for got, right in zip(jax.tree.leaves(each), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-6)


def pair(cluster: Cluster, prefix: str = "pair", rate: float = 1.0) -> tuple[Any, Any]:
    """Two variables on two tasks, from each of which a step's argument is subtracted; the step gives what it read."""
    with cluster.parameter_servers():
        model = dflow.variables({name: (lambda: jnp.zeros(4)) for name in ("first", "second")}, prefix=f"{prefix}/")
        optimizer = dflow.Optimizer(optax.sgd(rate), model, name=f"{prefix}/opt")
    assert model["first"].device != model["second"].device

    @dflow.jit
    def step(x: Any) -> Any:
        seen = {name: variable.read()[0] for name, variable in model.items()}
        # Made of what was read, as gradients are, so that it is read before they are given.
        optimizer.apply({name: jnp.full(4, -x) + 0 * sum(seen.values()) for name in model})
        return seen

    return model, step


def test_the_variables_that_a_step_reads_are_of_one_version_that_of_its_round(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        return [
            (float(seen["first"]), float(seen["second"]))
            for seen in Sync(cluster).run(step, itertools.repeat(1.0), steps=20, name="run")
        ]

    for seen in together(workers, work):
        assert seen == [(number, number) for number in range(20)]


# Slow workers.


class Turns:
    """Events by which workers wait for each other, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, threading.Event] = {}

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def done(self, name: str) -> None:
        """This has happened."""
        self._event(name).set()

    def wait(self, *names: str) -> None:
        """Wait until all of these have."""
        for name in names:
            assert self._event(name).wait(DEADLINE_S), f"{name} never came"


def slow_third(workers: list[Cluster], *, requeue: bool) -> tuple[list[Any], Any]:
    """Two workers do rounds 0 to 2 while the third, which has begun round 0, cannot end its step; then three more."""
    turns = Turns()
    found: dict[str, Any] = {}

    def batches(index: int) -> Iterator[float]:
        for number in range(6):
            if index < 2 and number == 3:
                turns.wait("the third is done with a stale step")
            yield 10.0**index

    def work(index: int, cluster: Cluster) -> Any:
        model, step = pair(cluster)
        found["model"] = model
        strategy = Sync(cluster, backup_workers=1, requeue=requeue)
        inner = step
        if index == 2:

            class Late:
                """The step, whose first call ends when the others are through with three rounds."""

                calls = 0
                __name__ = "late"
                trace = staticmethod(inner.trace)

                def __call__(self, x: Any) -> Any:
                    self.calls += 1
                    if self.calls == 1:
                        turns.wait("0 is through", "1 is through")
                    return inner(x)

            step = Late()
        kept = []
        for number, seen in enumerate(strategy.run(step, batches(index), steps=6, name="run")):
            kept.append(seen)
            if index < 2 and number == 2:
                turns.done(f"{index} is through")
            if index == 2 and number == 0:
                turns.done("the third is done with a stale step")
                break
        return strategy.accepted, strategy.dropped

    return together(workers, work), found["model"]


def test_the_first_of_a_round_are_averaged_and_a_slow_worker_is_dropped_and_counted(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    counts, model = slow_third(workers, requeue=False)
    assert counts == [(6, 0), (6, 0), (0, 1)]
    # The average of 1 and 10 in each of six rounds: the third's 100 is in none.
    for variable in model.values():
        np.testing.assert_allclose(variable.read(), 6 * 5.5)
    workers[0].report("ended", 1.0)
    status = memory.coordinator.status()
    assert [(worker.steps, worker.dropped) for worker in status.workers] == [(6, 0), (6, 0), (1, 1)]
    assert (status.steps_done, status.steps_total) == (6, 6)


class Diverging:
    """A step whose loss is no number in its third call alone."""

    __name__ = "diverging"

    def __init__(self, step: Any) -> None:
        self.step, self.calls = step, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return {**self.step(x), "loss": math.nan if self.calls == 3 else 0.5}


def test_a_loss_that_is_not_finite_and_a_run_short_of_its_rounds_stand_in_the_status(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    def work(index: int, cluster: Cluster) -> None:
        _, step = pair(cluster)
        list(Sync(cluster).run(Diverging(step) if index == 1 else step, [1.0] * 5, steps=9, name="run"))
        cluster.report(f"{index} is done", 1.0)  # after the worker's last report of its rounds

    together(workers, work)
    status = memory.coordinator.status()
    [found] = status.not_finite
    assert (found.run, found.task, found.metric, found.step) == ("run", workers[1].task, "loss", 2)
    assert (status.steps_done, status.steps_total) == (5, 9)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_batch_whose_gradient_was_dropped_is_used_again_if_that_is_wanted(
    workers: list[Cluster], requeue: bool
) -> None:
    turns, used = Turns(), []

    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)

        def late(x: Any) -> Any:
            used.append(int(x))
            if len(used) == 1:
                turns.wait("0", "1")
            return step(x)

        late.trace = step.trace  # type: ignore[attr-defined]
        strategy = Sync(cluster, backup_workers=1, requeue=requeue)
        supply = itertools.count(1.0) if index == 2 else itertools.repeat(0.0)
        for number, _ in enumerate(strategy.run(late if index == 2 else step, supply, steps=6, name="run")):
            if index < 2 and number == 0:
                turns.done(str(index))
            if index == 2 and number == 1:
                break
            if index < 2 and number == 2:
                turns.wait("second")
            if index == 2:
                turns.done("second")
        return strategy.dropped

    together(workers, work)
    assert used[:2] == ([1, 1] if requeue else [1, 2])


# Workers that die, end, leave and come.


def test_a_worker_that_dies_within_a_round_is_not_waited_for(workers: list[Cluster]) -> None:
    turns = Turns()

    def work(index: int, cluster: Cluster) -> Any:
        model, step = pair(cluster)
        done = 0
        run = Sync(cluster).run(step, itertools.repeat(1.0), steps=6, name="run")
        for _ in run:
            done += 1
            if index == 2 and done == 2:
                cluster.close()
                turns.done("dead")
                with pytest.raises(DflowError):
                    next(run)
                return None
        return done, np.asarray(model["first"].read())[0]

    found = together(workers, work)
    # The last gradient of the dead may have stood in for one of the living, which comes too late for that round.
    assert all(done in (5, 6) for done, _ in found[:2])
    assert all(value == pytest.approx(6.0) for _, value in found[:2])


def test_a_worker_that_runs_out_of_data_leaves_the_others_their_rounds(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        return len(list(Sync(cluster).run(step, [1.0] * [7, 0, 2][index], steps=7, name="run")))

    assert together(workers, work) == [7, 0, 2]


def test_when_all_run_out_of_data_all_end(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        model, step = pair(cluster)
        count = len(list(Sync(cluster).run(step, [1.0] * 3, steps=100, name="run")))
        return count, float(model["first"].read()[0])

    assert together(workers, work) == [(3, 3.0)] * 3


def test_leaving_the_loop_and_an_error_of_the_step_free_the_others(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)

        def batches() -> Iterator[Any]:
            yield from [1.0, 1.0]
            if index == 1:
                raise ZeroDivisionError("in the batches")
            yield from itertools.repeat(1.0)

        done = 0
        try:
            for _ in Sync(cluster).run(step, batches(), steps=8, name="run"):
                done += 1
                if index == 2 and done == 4:
                    break
        except ZeroDivisionError:
            return -done
        return done

    assert together(workers, work) == [8, -2, 4]


def test_a_worker_that_joins_late_takes_part_from_then_on(memory: MemoryCluster, workers: list[Cluster]) -> None:
    turns = Turns()
    late: list[Cluster] = []
    workers[2].close()

    def supply(index: int) -> Iterable[float]:
        for number in range(8):
            if index == 0 and number == 3:
                turns.wait("joined")
            yield 1.0

    def work(index: int, cluster: Cluster | None) -> Any:
        if cluster is None:
            turns.wait("third round")
            cluster = memory.worker(2, SOON)
            late.append(cluster)
        _, step = pair(cluster)
        strategy = Sync(cluster)
        rounds = []
        for number, seen in enumerate(strategy.run(step, supply(index), steps=8, name="run")):
            rounds.append(round(float(seen["first"])))
            if index == 1 and number == 1:
                turns.done("third round")
            if index == 2:
                turns.done("joined")
        assert strategy.dropped == 0
        return rounds

    found = together([*workers[:2], None], work)
    late[0].close()
    assert found[:2] == [list(range(8))] * 2
    assert found[2] in (list(range(2, 8)), list(range(3, 8)))


def test_a_run_that_is_named_again_is_over(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        counts = [len(list(Sync(cluster).run(step, itertools.repeat(1.0), steps=3, name="run"))) for _ in range(2)]
        with pytest.raises(RemoteError, match="run 'run' has 3 rounds and was asked for with 4"):
            list(Sync(cluster).run(step, itertools.repeat(1.0), steps=4, name="run"))
        return counts

    assert together(workers, work) == [[3, 0]] * 3


def test_a_worker_that_gives_no_gradient_is_named_when_the_time_is_over(memory: MemoryCluster) -> None:
    settings = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=0.2)
    with closing(memory.worker(0, settings)) as cluster:
        _, step = pair(cluster)
        with pytest.raises(
            DeadlineExceeded,
            match=r"round 0 of 'run' has not ended: 3 gradients .*worker/task:0 gave one and .*task:1, ",
        ):
            list(Sync(cluster).run(step, itertools.repeat(1.0), steps=3, name="run"))


def test_a_worker_that_waits_says_whom_for_long_before_its_time_is_over(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(round_part, "NOTICE_AFTER_S", 0.05)
    settings = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=0.5)
    with closing(memory.worker(0, settings)) as cluster:
        _, step = pair(cluster)
        with pytest.raises(DeadlineExceeded, match="not joined yet: worker:1, worker:2\n  start what is missing"):
            list(Sync(cluster).run(step, itertools.repeat(1.0), steps=3, name="run"))
    said = [record.getMessage() for record in caplog.records if "waits, for" in record.getMessage()]
    assert said
    assert all("worker/task:0 gave one" in text and "not joined yet: worker:1, worker:2" in text for text in said)


def test_a_lost_parameter_task_ends_the_run_of_every_worker(memory: MemoryCluster, workers: list[Cluster]) -> None:
    def batches(index: int) -> Iterator[float]:
        yield from itertools.repeat(1.0, 3)
        if index == 0:
            memory.tasks["ps:1"].close()
        yield from itertools.repeat(1.0)

    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        run = Sync(cluster).run(step, batches(index), steps=1000, name="run")
        with pytest.raises((TaskLost, RemoteError)):
            list(run)

    together(workers, work)


def test_a_run_goes_on_after_a_failed_update_when_every_process_is_back(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    host, other = memory.tasks["ps:0"].server, memory.tasks["ps:1"].server
    run_part, failed = other.run, itertools.count()

    def run(handle: int, step: StepId, feeds: Sequence[Any], on_done: Callable[[Any], None]) -> None:
        if step.origin == host.name and next(failed) in (1, 3):
            raise TaskLost("the connection broke")
        run_part(handle, step, feeds, on_done)

    other.run = run  # type: ignore[method-assign]

    def work(index: int, cluster: Cluster) -> Any:
        model, step = pair(cluster)
        # By its own will, so that none of the others waits for it in the end.
        supply, seen, errors = itertools.repeat(1.0, 1000), [], []
        while True:
            try:
                for each in Sync(cluster).run(step, supply, steps=6, name="run"):
                    seen.append(float(each["second"]))
            except TaskLost as error:
                errors.append(str(error))
            else:
                return seen, errors, [float(variable.read()[0]) for variable in model.values()]

    for seen, errors, (first, second) in together(workers, work):
        assert 6 <= len(seen) <= 8
        assert seen == sorted(seen)
        assert 1 <= len(errors) <= 2
        assert all("failed: TaskLost: " in error and "the connection broke" in error for error in errors)
        # A task that had applied the average of a failed update has done so once more.
        assert (second, first) in [(6.0, 6.0 + twice) for twice in range(3)]


def test_finished_runs_leave_nothing_but_their_numbers_on_any_task(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    steps = [pair(cluster)[1] for cluster in workers]

    def do(name: str) -> None:
        together(
            workers, lambda index, one: list(Sync(one).run(steps[index], itertools.repeat(1.0), steps=3, name=name))
        )

    def held() -> Any:
        gc.collect()
        servers = [task.server for task in memory.tasks.values()] + [cluster.server for cluster in workers]
        return (
            [(server.statistics().plans, [depth.name for depth in server.state().depths]) for server in servers],
            [len(step.trace_log()) for step in steps],
            [info.name for info in memory.coordinator.status().variables],
            len(jax.live_arrays()),
        )

    for number in range(3):  # on each of the two hosts, and once more
        do(f"early {number}")
    before = held()
    assert [depths for _, depths in before[0]] == [[]] * 5
    for number in range(3):
        do(f"late {number}")
    assert held() == before


# The same function.


def test_a_step_that_ran_by_itself_is_traced_anew_and_goes_back(workers: list[Cluster]) -> None:
    model, step = pair(workers[0])
    step(1.0)
    assert float(model["first"].read()[0]) == 1.0

    def work(index: int, cluster: Cluster) -> None:
        mine = step if index == 0 else pair(cluster)[1]
        list(Sync(cluster).run(mine, itertools.repeat(3.0), steps=2, name="run"))

    together(workers, work)
    assert float(model["first"].read()[0]) == 7.0
    step(1.0)
    assert float(model["first"].read()[0]) == 8.0


def test_alone_every_step_is_a_round() -> None:
    weight = dflow.Variable(0.0, name="weight")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [weight])

    @dflow.jit
    def step(x: Any) -> Any:
        optimizer.apply([-x])
        return weight.read()

    strategy = Sync(Alone())
    assert [float(value) for value in strategy.run(step, [1.0, 2.0, 3.0], steps=2)] == [1.0, 3.0]
    assert (strategy.accepted, strategy.dropped) == (2, 0)
    with pytest.raises(StrategyError, match="backup_workers=1 of 1 worker leaves none"):
        Sync(Alone(), backup_workers=1)


# What is refused.


def test_what_cannot_be_synchronous_is_refused(workers: list[Cluster]) -> None:
    cluster = workers[0]
    with cluster.parameter_servers():
        far = dflow.Variable(0.0, name="far")
        optimizer = dflow.Optimizer(optax.sgd(1.0), [far], name="opt")
    near = dflow.Variable(0.0, name="near")
    own = dflow.Optimizer(optax.sgd(1.0), [near], name="own")
    twice = dflow.jit(lambda x: [optimizer.apply([x]), optimizer.apply([x])] and x)
    cases: list[tuple[Any, type[DflowError], str]] = [
        (dflow.jit(lambda x: x), StrategyError, r"gives gradients 0 times \(to none\)"),
        (twice, StrategyError, r"gives gradients 2 times \(to opt, opt\)"),
        (dflow.jit(lambda x: own.apply([x])), VariableError, "'near' of 'own' lives in this process"),
        (lambda x: optimizer.apply([x]), StrategyError, r"is not a function of dflow.jit(.|\n)*decorate it"),
    ]
    for number, (step, error, text) in enumerate(cases):
        with pytest.raises(error, match=text):
            list(Sync(cluster).run(step, [1.0], steps=1, name=f"run {number}"))
    for count in (-1, 3):
        with pytest.raises(StrategyError, match=f"backup_workers={count} of 3 workers leaves none"):
            Sync(cluster, backup_workers=count)


def test_gradients_that_travel_smaller_are_rounded_once_on_their_way_into_the_variables(
    workers: list[Cluster],
) -> None:
    given = [jnp.asarray(np.random.default_rng(number).normal(size=64), jnp.float32) for number in range(3)]
    type = ArrayType(np.dtype("float32"), (64,))
    expected = -sum(np.asarray(decoded("int8", encoded("int8", one), type)) for one in given) / 3

    def work(number: int, cluster: Cluster) -> tuple[Any, Any]:
        with cluster.parameter_servers():
            # Of the two, one lies on another task than the mean does.
            model = [dflow.Variable(lambda: jnp.zeros(64), name=f"smaller/{name}") for name in "ab"]
            optimizer = dflow.Optimizer(optax.sgd(1.0), model, name="smaller/sgd", wire="int8")
        assert model[0].device != model[1].device
        step = dflow.jit(lambda x: optimizer.apply([x, x]))
        for _ in Sync(cluster, job="ps").run(step, [(given[number],)], steps=1, name="smaller"):
            pass
        return [np.asarray(each.read()) for each in model]

    for a, b in together(workers, work):
        np.testing.assert_allclose(a, expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(b, expected, rtol=1e-6, atol=1e-7)
