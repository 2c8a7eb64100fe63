"""Optimizers of sharded variables that treat shards as arrays of their own are reported."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import optax
import pytest

import dflow

APART = {
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip by block": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
}
ALIKE = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adamw": optax.adamw(0.1),
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
}


def make(transformation: optax.GradientTransformation, shards: int) -> None:
    table = dflow.ShardedVariable(lambda: jnp.ones((1000, 200)), shards=shards, name="table")
    dflow.Optimizer(transformation, {"table": table, "other": dflow.Variable(jnp.ones(3))}, name="optimizer")


@pytest.mark.parametrize("name", APART)
def test_a_transformation_of_whole_arrays_is_reported(name: str) -> None:
    with pytest.warns(
        dflow.ShardedUpdateWarning, match="'table': its optimizer treats each of 3 shards as a separate array"
    ):
        make(APART[name], 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(APART[name], 1)


@pytest.mark.parametrize("name", ALIKE)
def test_one_that_treats_rows_alike_is_not(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(ALIKE[name], 3)
