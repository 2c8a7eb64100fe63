"""Synchronous training over a cluster in this process has the weights of one process on all batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.wire.messages.status import GetStatus
from dflow.testing import MemoryCluster
from dflow.tracing.errors import GraphTypeError, StrategyError, VariableError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.ir.wire_codecs import decoded, encoded
from tests.distributed.training.sync_programs import Sync, pair, together

#: By name, the initial values of a model, and its output.
MODELS: Any = {
    "mlp": (
        {
            "hidden": lambda: jax.random.normal(jax.random.key(0), (4, 8)) / 2,
            "bias": lambda: jnp.zeros(8),
            "out": lambda: jax.random.normal(jax.random.key(0), (8, 1)),
        },
        lambda model, x: jax.nn.tanh(x @ model["hidden"] + model["bias"]) @ model["out"],
    ),
    # Each step looks up few rows of the table.
    "rows": (
        {"table": lambda: jax.random.normal(jax.random.key(1), (50, 3)), "out": lambda: jnp.ones((3, 1))},
        lambda model, rows: model["table"][rows] @ model["out"],
    ),
}


class Model:
    """A model with one optimizer, or with one for each of its variables, and a step."""

    def __init__(self, cluster: Cluster, kind: str, transformations: Any, prefix: str) -> None:
        initial, output = MODELS[kind]
        with cluster.parameter_servers():
            self.variables = model = dflow.variables(initial, prefix=f"{prefix}/")
            parts = [[name] for name in model] if len(transformations) > 1 else [[*model]]
            optimizers = [
                dflow.Optimizer(made(), {name: model[name] for name in names}, name=f"{prefix}/{names[0]}/opt")
                for made, names in zip(transformations, parts, strict=True)
            ]

        @dflow.jit
        def step(x: Any, y: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: jnp.mean((output(model, x) - y) ** 2), model)()
            for optimizer, names in zip(optimizers, parts, strict=True):
                optimizer.apply({name: gradients[name] for name in names})
            return {"loss": value}

        self.step, self.slots = step, [optimizer.slots for optimizer in optimizers]

    def state(self) -> Any:
        return jax.device_get([dflow.read(self.variables), dflow.read(self.slots)])


ROUNDS, EACH = 5, 4


def numbers(kind: str) -> list[tuple[Any, Any]]:
    drawn = np.random.default_rng(0)
    x = [drawn.normal(size=(3, EACH, 4)).astype(np.float32) for _ in range(ROUNDS)]
    rows = [drawn.integers(0, 50, size=(3, EACH)).astype(np.int32) for _ in range(ROUNDS)]
    y = [drawn.normal(size=(3, EACH, 1)).astype(np.float32) for _ in range(ROUNDS)]
    return list(zip(x if kind == "mlp" else rows, y, strict=True))


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
@pytest.mark.parametrize(
    ("kind", "transformations"),
    [
        ("mlp", [lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))]),
        ("rows", [lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))]),
        ("rows", [lambda: optax.adagrad(0.1), lambda: optax.adam(1e-2)]),
    ],
    ids=["clipped adamw", "rows clipped momentum", "two optimizers"],
)
def test_three_workers_have_the_weights_of_one_process_on_all_their_batches(
    workers: list[Cluster], kind: str, transformations: list[Callable[[], Any]]
) -> None:
    batches = numbers(kind)

    def work(index: int, cluster: Cluster) -> Any:
        model = Model(cluster, kind, transformations, "together")
        mine = [(x[index], y[index]) for x, y in batches]
        strategy = Sync(cluster)
        outcomes = list(strategy.run(model.step, mine, steps=ROUNDS, name="run"))
        assert (len(outcomes), strategy.accepted, strategy.dropped) == (ROUNDS, ROUNDS, 0)
        return model.state()

    found = together(workers, work)
    model = Model(dflow.connect(), kind, transformations, "alone")
    for x, y in batches:
        model.step(np.concatenate(x), np.concatenate(y))
    wanted = model.state()
    for each in found:
        for got, right in zip(jax.tree.leaves(each), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_the_variables_that_a_step_reads_are_of_one_version_that_of_its_round(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        _, step = pair(cluster)
        return [
            (float(seen["first"]), float(seen["second"]))
            for seen in Sync(cluster).run(step, itertools.repeat(1.0), steps=20, name="run")
        ]

    for seen in together(workers, work):
        assert seen == [(number, number) for number in range(20)]


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_a_step_that_ran_by_itself_is_traced_anew_and_goes_back(workers: list[Cluster]) -> None:
    model, step = pair(workers[0])
    step(1.0)
    assert float(model["first"].read()[0]) == 1.0

    def work(index: int, cluster: Cluster) -> None:
        mine = step if index == 0 else pair(cluster)[1].fn  # a step of plain Python is compiled
        list(Sync(cluster).run(mine, itertools.repeat(3.0), steps=2, name="run"))

    together(workers, work)
    assert float(model["first"].read()[0]) == 7.0
    step(1.0)
    assert float(model["first"].read()[0]) == 8.0


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_a_step_that_cannot_be_synchronous_is_refused(workers: list[Cluster]) -> None:
    cluster = workers[0]
    with cluster.parameter_servers():
        far = dflow.Variable(0.0, name="far")
        optimizer = dflow.Optimizer(optax.sgd(1.0), [far], name="opt")
    near = dflow.Variable(0.0, name="near")
    own = dflow.Optimizer(optax.sgd(1.0), [near], name="own")
    twice = dflow.jit(lambda x: [optimizer.apply([x]), optimizer.apply([x])] and x)
    inner = dflow.jit(lambda x: optimizer.apply([x]))
    scanned = dflow.jit(lambda x: jax.lax.scan(lambda c, _: (optimizer.apply([c]) or c, c), x, None, 3)[0])
    looped = dflow.jit(lambda x: jax.lax.fori_loop(0, jnp.int32(x), lambda _, c: optimizer.apply([c]) or c, x))
    nested = dflow.jit(lambda x: [inner(x), inner(x)] and x)
    cases: list[tuple[Any, type[Exception], str]] = [
        (scanned, StrategyError, r"gives gradients 3 times \(to opt\).*\n  at .*\n  call apply .* outside of loops"),
        (looped, StrategyError, r"gives gradients 2 times \(to opt\)"),
        (nested, StrategyError, r"gives gradients 2 times \(to opt\)"),
        (dflow.jit(lambda x: x), StrategyError, r"gives gradients 0 times \(to none\)"),
        (twice, StrategyError, r"gives gradients 2 times \(to opt, opt\)"),
        (dflow.jit(lambda x: own.apply([x])), VariableError, "'near' of 'own' lives in this process"),
        ([1.0], StrategyError, r"run: expected a function for step, got \[1.0\]"),
        (lambda x: optimizer.apply([x]) or float(x), jax.errors.ConcretizationTypeError, "traced"),
    ]
    for number, (step, error, text) in enumerate(cases):
        with pytest.raises(error, match=text):
            list(Sync(cluster).run(step, [1.0], steps=1, name=f"run {number}"))
    with pytest.raises(jax.errors.ConcretizationTypeError):  # alone too
        list(Sync(dflow.connect()).run(float, [1.0], steps=1))
    for count in (-1, 3):
        with pytest.raises(StrategyError, match=f"backup_workers={count} of 3 workers leaves none"):
            Sync(cluster, backup_workers=count)


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_gradients_that_travel_smaller_are_rounded_once_on_their_way_into_the_variables(workers: list[Cluster]) -> None:
    given = [jnp.asarray(np.random.default_rng(number).normal(size=64), jnp.float32) for number in range(3)]
    type = ArrayType(np.dtype("float32"), (64,))
    expected = -sum(np.asarray(decoded("int8", encoded("int8", one), type)) for one in given) / 3

    def work(number: int, cluster: Cluster) -> tuple[Any, Any]:
        with cluster.parameter_servers():
            # One of the two is on another task than the accumulator.
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


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_a_run_of_no_rounds_looks_at_no_batch(workers: list[Cluster]) -> None:
    def batch(number: int) -> Any:
        raise AssertionError("no batch is needed")

    _, step = pair(workers[0], "no_rounds")
    assert list(Sync(workers[0]).run(step, batch, steps=0, name="no rounds")) == []


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_the_last_result_comes_with_the_last_update(workers: list[Cluster]) -> None:
    """So a program that takes the results by `next`, and then stops, has trained and reported all steps."""
    made = Model(workers[0], "mlp", [lambda: optax.sgd(0.1)], "last")
    model = made.variables
    run = Sync(workers[0], backup_workers=2).run(made.step, lambda number: (np.ones((2, 4)), np.ones((2, 1))), steps=3)
    before = model["bias"].read()
    for _ in range(3):
        next(run)
        before, last = model["bias"].read(), before
    status = workers[0].coordinator.ask(GetStatus())
    assert (status.steps_done, status.steps_total) == (3, 3)
    assert not np.array_equal(before, last)
    after = np.asarray(before)
    run.close()
    np.testing.assert_array_equal(model["bias"].read(), after)


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
def test_a_gradient_travels_once_and_averages_do_not_travel(memory: MemoryCluster, workers: list[Cluster]) -> None:
    """Each task averages the gradients of the variables that it holds."""
    rounds, shape = 4, (64, 64)

    def work(index: int, cluster: Cluster) -> None:
        model = []
        with cluster.parameter_servers():
            for number in range(4):
                with dflow.device(f"ps:{number % 2}"):
                    model.append(dflow.Variable(lambda: jnp.zeros(shape), name=f"travels/{number}"))
            optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="travels/optimizer")
        step = dflow.jit(lambda x: optimizer.apply([jnp.full(shape, x + number) for number in range(4)]))
        list(Sync(cluster).run(step, itertools.repeat(1.0), steps=rounds, name="run"))

    together(workers, work)
    assert [(task.server.runs.updates, task.server.runs.missed) for task in memory.tasks.values()] == [(0, 0)] * 2
    sent: Counter[tuple[str, str]] = Counter()
    for server in [*(task.server for task in memory.tasks.values()), *(cluster.server for cluster in workers)]:
        for one in server.traffic():
            sent[one.source[5:-7], one.destination[5:-7]] += one.size_bytes
    gradients = 3 * rounds * 4 * 4 * 64 * 64
    assert gradients <= sent["worker", "ps"] < gradients * 1.01
    assert sent["ps", "ps"] < gradients / 100


# The extra arguments of `Optimizer.apply` in a synchronous step: averaged with the gradients, or refused.


STEPS = 5


def made(device: Any, transformation: Any, extra: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A variable, and a step that passes `extra` of the loss with the gradient."""
    with device.parameter_servers():
        weights = dflow.Variable(lambda: jnp.zeros(3), name="weights")
        optimizer = dflow.Optimizer(transformation, [weights], name="opt")

    @dflow.jit
    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return ((x @ weights - y) ** 2).mean()

        value, gradients = dflow.value_and_grad(loss, [weights])()
        optimizer.apply(gradients, **extra(value))
        return value

    return weights, step


def batches() -> list[tuple[Any, Any]]:
    drawn = np.random.default_rng(0)
    return [tuple(drawn.normal(size=size).astype(np.float32) for size in ((3, 4, 3), (3, 4))) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "transformation",
    [optax.polyak_sgd, lambda: optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.2))],
    ids=["polyak_sgd", "reduce_on_plateau"],
)
def test_a_value_is_the_mean_over_the_workers(workers: list[Cluster], transformation: Callable[[], Any]) -> None:
    def work(index: int, cluster: Cluster) -> Any:
        weights, step = made(cluster, transformation(), lambda value: {"value": value})
        mine = [(x[index], y[index]) for x, y in batches()]
        list(dflow.distributed.Sync(cluster).run(step, mine, steps=STEPS, name="run"))
        return jax.device_get(weights.read())

    found = together(workers, work)
    weights, step = made(dflow.connect(), transformation(), lambda value: {"value": value})
    for x, y in batches():
        step(np.concatenate(x), np.concatenate(y))
    for each in found:
        np.testing.assert_allclose(each, weights.read(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("transformation", "extra", "error", "text"),
    [
        (
            optax.lbfgs(),
            lambda value: {"value": value, "grad": [jnp.ones(3)], "value_fn": lambda params: params[0].sum()},
            StrategyError,
            "apply: expected extra arguments of floating arrays, .* got 'value_fn' with a function",
        ),
        (
            optax.polyak_sgd(),
            lambda value: {"value": jnp.int32(3)},
            StrategyError,
            "apply: expected extra arguments of floating arrays, .* got 'value'",
        ),
        (optax.polyak_sgd(), lambda value: {}, GraphTypeError, "the transformation needs, got none: .* 'value'"),
        (optax.sgd(0.1), lambda value: {"value": value}, GraphTypeError, "the transformation uses, got 'value'"),
    ],
    ids=["a function", "an integer", "missing", "unused"],
)
def test_extra_arguments_without_a_mean_are_refused(
    workers: list[Cluster], transformation: Any, extra: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    _, step = made(workers[0], transformation, extra)
    x, y = batches()[0]
    with pytest.raises(error, match=text) as caught:
        next(dflow.distributed.Sync(workers[0]).run(step, [(x[0], y[0])], steps=1, name="run"))
    assert "  at " in str(caught.value)


def test_gradients_of_single_examples_are_refused(workers: list[Cluster]) -> None:
    with workers[0].parameter_servers():
        weights = dflow.Variable(lambda: jnp.zeros(3), name="weights")
        by_example = optax.stateless(lambda updates, _: jax.tree.map(lambda each: -each.mean(0), updates))
        optimizer = dflow.Optimizer(by_example, weights, name="opt")

    @dflow.jit
    def step(x: Any, y: Any) -> None:
        optimizer.apply(jax.vmap(dflow.grad(lambda x, y: (x @ weights - y) ** 2, weights))(x, y))

    x, y = batches()[0]
    words = r"apply: expected one gradient of variable 'weights' in a synchronous step, got 4, one for each example"
    with pytest.raises(StrategyError, match=words):
        next(dflow.distributed.Sync(workers[0]).run(step, [(x[0], y[0])], steps=1, name="run"))
