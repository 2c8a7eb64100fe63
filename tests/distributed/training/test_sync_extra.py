"""The extra arguments of `Optimizer.apply` in a synchronous step: averaged with the gradients, or refused."""

from __future__ import annotations

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
from dflow.tracing.errors import GraphTypeError, StrategyError
from tests.distributed.training.sync_programs import together

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
    [
        optax.polyak_sgd,
        lambda: optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.2)),
    ],
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
