"""The matrix factorisation of `factorisation_in_jax.py` with variables. Its loss and data are imported.

Both tables are only looked up in. A step reads the rows of its batch, and on a cluster only these are sent.
"""

import jax
import jax.numpy as jnp

import dflow
from tests.ports.factorisation_in_jax import batches, initial_parameters, loss_of, train, transformation
from tests.ports.norms import norms

__all__ = ["batches", "build", "train"]


def build(cluster, microbatches=1):
    with cluster.parameter_servers():
        model = dflow.variables(initial_parameters(), prefix="factorisation/")
        optimizer = dflow.Optimizer(transformation(), model, name="adagrad")
    differentiated = dflow.value_and_grad(lambda *batch: loss_of(model, *batch), model, has_aux=True)

    @dflow.jit
    def step(*batch):
        parts = zip(*(jnp.split(array, microbatches) for array in batch), strict=True)
        found = [differentiated(*part) for part in parts]
        (loss, accuracy), gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        before = dflow.read(model)
        optimizer.apply(gradients)
        return {"loss": loss, "accuracy": accuracy, **norms(gradients, before, dflow.read(model))}

    return step
