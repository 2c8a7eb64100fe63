"""Optimizers of sharded variables: they update as on the whole array, or say that they do not."""

from __future__ import annotations

import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.testing import memory_cluster

SHAPE = (393, 130)

#: Transformations that compute something of a whole array.
OF_WHOLE = {
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1),
    "muon": optax.contrib.muon(0.1),
    "novograd": optax.novograd(0.1),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "noisy": optax.noisy_sgd(0.1, key=jax.random.key(1)),
    "accumulated": optax.MultiSteps(optax.lamb(0.1), 2).gradient_transformation(),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.1)),
}
#: Those that treat elements or rows alike, or norms over all variables.
ALIKE = {
    "adagrad": optax.adagrad(0.1),
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
}
#: Those whose ops need an array whole, for tables of these shapes.
APART = {
    "sm3": (optax.sm3(0.1), SHAPE, "rows"),
    "adafactor of small shards": (optax.adafactor(0.1), (300, 200), "rows"),
    "muon along the short side": (optax.contrib.muon(0.1), SHAPE, "columns"),
}


def first_value(shape: tuple[int, ...] = SHAPE) -> Any:
    return jax.random.normal(jax.random.key(0), shape)


def loss_of(array: Any, scale: Any) -> Any:
    return (jnp.sin(array) ** 2).sum() * scale


class Run:
    """A table in shards and another variable, which an optimizer trains."""

    def __init__(self, transformation: Any, shards: int, by: str = "rows", shape: tuple[int, ...] = SHAPE) -> None:
        self.table = dflow.ShardedVariable(first_value(shape), shards=shards, by=by, name="table")
        self.other = dflow.Variable(jnp.ones(3), name="other")
        both = {"table": self.table, "other": self.other}
        self.optimizer = dflow.Optimizer(transformation, both, name="optimizer")
        self.state = (both, self.optimizer.slots)

        @dflow.jit
        def step(scale: Any) -> None:
            def loss() -> Any:
                return loss_of(self.table.read(), scale) + self.other.sum()

            self.optimizer.apply(dflow.grad(loss, both)())

        self.step = step


def by_optax(transformation: Any, steps: int) -> Any:
    params = {"table": first_value(), "other": jnp.ones(3)}
    state = transformation.init(params)
    step = jax.jit(
        lambda params, state, scale: transformation.update(
            jax.grad(lambda params: loss_of(params["table"], scale) + params["other"].sum())(params), state, params
        )
    )
    for number in range(steps):
        updates, state = step(params, state, number + 1.0)
        params = optax.apply_updates(params, updates)
    return params


def assert_alike(run: Run, wanted: Any) -> None:
    np.testing.assert_allclose(run.table.read(), wanted["table"], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(run.other.read(), wanted["other"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *(
            (name, "rows")
            for name in ("lamb", "muon", "novograd", "adaptive clip", "noisy", "accumulated", "global norm")
        ),
        *((name, "modulo") for name in ("adafactor", "noisy")),
        *((name, "columns") for name in ("lamb", "centralized", "adagrad")),
    ],
)
def test_shards_are_updated_as_the_whole_array(name: str, by: str) -> None:
    transformation = (OF_WHOLE | ALIKE)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run(transformation, 3, by)
    for number in range(3):
        run.step(number + 1.0)
    assert_alike(run, by_optax(transformation, 3))


def test_shards_on_tasks_are_updated_as_the_whole_array() -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            run = Run(OF_WHOLE["lamb"], 2)
        run.step(1.0)
        assert_alike(run, by_optax(OF_WHOLE["lamb"], 1))


@pytest.mark.parametrize("name", APART)
def test_a_transformation_that_needs_whole_arrays_is_reported(name: str) -> None:
    transformation, shape, by = APART[name]
    with pytest.warns(
        dflow.ShardedUpdateWarning, match="'table': its optimizer treats each of 3 shards as a separate array"
    ):
        Run(transformation, 3, by, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(transformation, 1, by, shape)


def test_a_run_goes_on_with_another_number_of_shards(tmp_path: Path) -> None:
    before = Run(OF_WHOLE["noisy"], 2)
    before.step(1.0)
    dflow.save(tmp_path / "saved", before.state)
    del before
    after = Run(OF_WHOLE["noisy"], 3)
    dflow.restore(tmp_path / "saved", after.state)
    after.step(2.0)
    assert_alike(after, by_optax(OF_WHOLE["noisy"], 2))
