"""Gradients for variables of each process: what is kept for each step, and how long."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.dense_gradients import DenseGradients
from dflow.distributed.training.applying import applying
from dflow.state_backends import LOCAL
from dflow.tracing.errors import StrategyError


def test_an_optimizer_has_either_tables_or_dense_layers(worker: Cluster) -> None:
    with worker.parameter_servers():
        table = dflow.Variable(np.zeros((4, 2), np.float32), name="table of both")
    layer = dflow.Variable(np.zeros(2, np.float32), name="layer of both")
    dense = DenseGradients(worker)
    own, theirs, both = (
        dflow.Optimizer(optax.sgd(0.1), variables, name=f"sgd {number}")
        for number, variables in enumerate(([layer], [table], [layer, table]))
    )
    assert dense.takes(own)
    assert not dense.takes(theirs)
    fact = (
        r"'sgd 2' has variable 'layer of both' in this process and 'table of both' on /job:ps(.|\n)*make one optimizer"
    )
    with pytest.raises(StrategyError, match=fact):
        dense.takes(both)


#: The type of the gradients, and the further arguments of `Optimizer.apply`.
GRADIENT: Any = [jax.ShapeDtypeStruct((2,), jnp.float32)], {}


class Layer:
    """A variable, its optimizer, and a step that gives it the gradient `x`."""

    def __init__(self, name: str) -> None:
        self.v = dflow.Variable(jnp.zeros(2), name=name)
        self.optimizer = dflow.Optimizer(optax.sgd(0.5), [self.v], name=f"optimizer of {name}")
        self.step = dflow.jit(lambda x: self.optimizer.apply([x]))

    def train(self, dense: DenseGradients, x: Any) -> list[float]:
        """Do a step with the gradient `x`; return the variable's value."""
        given = dense.use([(self.optimizer, GRADIENT)])
        with applying(dense):
            self.step(x)
        dense.apply_means(given)
        return np.asarray(self.v.read()).tolist()


def kept(dense: DenseGradients) -> list[str]:
    gc.collect()
    keys = LOCAL.store.keys()
    return [key for key in keys if key.startswith(f"{dense.name}/")]


def test_gradients_are_kept_as_long_as_their_optimizer() -> None:
    dense, layer = DenseGradients(dflow.connect()), Layer("layer")
    assert layer.train(dense, jnp.ones(2)) == [-0.5, -0.5]
    assert layer.train(dense, jnp.ones(2)) == [-1, -1]
    assert len(kept(dense)) == 1
    other = Layer("other")
    other.train(dense, jnp.ones(2))
    assert len(kept(dense)) == 2
    gone = ref(layer.optimizer)
    del layer
    assert len(kept(dense)) == 1
    assert gone() is None
    assert other.train(dense, jnp.ones(2)) == [-1, -1]


def test_each_structure_of_gradients_has_its_variables() -> None:
    dense, layer = DenseGradients(dflow.connect()), Layer("layer of two structures")
    names = []
    for types in (GRADIENT, (GRADIENT[0], {"value": jax.ShapeDtypeStruct((), jnp.float32)}), GRADIENT):
        dense.use([(layer.optimizer, types)])
        names.append(kept(dense))
    assert [len(one) for one in names] == [1, 3, 3]
    # The compiled step of the first structure writes the first variable.
    assert layer.train(dense, jnp.ones(2)) == [-0.5, -0.5]


def test_two_loops_at_once_update_their_own_variables() -> None:
    dense, one, two = DenseGradients(dflow.connect()), Layer("layer of one loop"), Layer("layer of two loops")
    given, _ = dense.use([(one.optimizer, GRADIENT)]), dense.use([(two.optimizer, GRADIENT)])
    with applying(dense):
        one.step(jnp.ones(2))
    dense.apply_means(given)
    assert [np.asarray(layer.v.read()).tolist() for layer in (one, two)] == [[-0.5, -0.5], [0.0, 0.0]]
