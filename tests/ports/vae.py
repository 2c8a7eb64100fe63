"""The variational autoencoder of `vae_in_jax.py` with variables. Its networks and data are imported.

The random key and the number of the step are state of the worker: a generator and a variable, made outside of
`parameter_servers`.
"""

import jax
import jax.numpy as jnp

import dflow
from tests.ports.norms import norms
from tests.ports.vae_in_jax import FADED_IN, batches, initial_parameters, loss_of, train, transformation

__all__ = ["batches", "build", "train"]


def build(cluster, microbatches=1):
    with cluster.parameter_servers():
        model = dflow.variables(initial_parameters(), prefix="vae/")
        optimizer = dflow.Optimizer(transformation(), model, name="adam")
    noise = dflow.Generator(jax.random.key(1), name="noise")
    number = dflow.Variable(0, name="number of the step")
    differentiated = dflow.value_and_grad(lambda *batch: loss_of(model, *batch), model, has_aux=True)

    @dflow.jit
    def step(pictures):
        weight = jnp.minimum(number / FADED_IN, 1.0)
        number.assign_add(1)
        parts = zip(jnp.split(pictures, microbatches), noise.split(microbatches), strict=True)
        found = [differentiated(part, key, weight) for part, key in parts]
        (loss, metrics), gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        before = dflow.read(model)
        optimizer.apply(gradients)
        return {"loss": loss, **metrics, **norms(gradients, before, dflow.read(model))}

    return step
