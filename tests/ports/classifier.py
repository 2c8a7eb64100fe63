"""The NNX classifier of `classifier_in_jax.py` with variables. Its module and data are imported.

`nnx.split` gives the module's parts once. From then on its parameters and statistics are variables. The loss builds the
module from their values, and writes the new statistics, so they are not a result.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import dflow
from tests.ports.classifier_in_jax import Classifier, batches, loss_of, train, transformation
from tests.ports.norms import norms

__all__ = ["batches", "build", "train"]


def build(cluster, microbatches=1):
    definition, first_params, first_statistics = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    with cluster.parameter_servers():
        params = dflow.variables(first_params, prefix="classifier/")
        statistics = dflow.variables(first_statistics, prefix="classifier/", trainable=False)
        optimizer = dflow.Optimizer(transformation(), params, name="sgd")
    dropout = dflow.Generator(jax.random.key(1), name="dropout")

    def loss(*batch):
        model = nnx.merge(definition, dflow.read(params), dflow.read(statistics))
        value, accuracy = loss_of(model, *batch)
        dflow.assign(statistics, nnx.state(model, nnx.BatchStat))
        return value, accuracy

    differentiated = dflow.value_and_grad(loss, params, has_aux=True)

    @dflow.jit
    def step(x, labels):
        parts = zip(
            jnp.split(x, microbatches), jnp.split(labels, microbatches), dropout.split(microbatches), strict=True
        )
        found = [differentiated(*part) for part in parts]
        (value, accuracy), gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        before = dflow.read(params)
        optimizer.apply(gradients)
        metrics = {"loss": value, "accuracy": accuracy, "statistics": optax.tree.norm(dflow.read(statistics))}
        return metrics | norms(gradients, before, dflow.read(params))

    return step
