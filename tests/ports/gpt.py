"""The GPT of `gpt_in_jax.py` with variables. The model, its loss and its data are imported.

The parameters are variables, so the step neither takes nor returns them. The embeddings are looked up in, so only the
batch's rows of the token table are read.
"""

import jax
import jax.numpy as jnp

import dflow
from tests.ports.gpt_in_jax import LENGTH, batches, initial_parameters, loss_of, train, transformation
from tests.ports.norms import norms

__all__ = ["batches", "build", "train"]


def build(cluster, microbatches=1):
    with cluster.parameter_servers():
        model = dflow.variables(initial_parameters(), prefix="gpt/")
        optimizer = dflow.Optimizer(transformation(), model, name="adamw")
    differentiated = dflow.value_and_grad(lambda tokens: loss_of(model, tokens), model, has_aux=True)

    def accumulated(tokens):
        def add(total, part):
            (loss, accuracy), gradients = differentiated(part)
            return jax.tree.map(jnp.add, total, gradients), (loss, accuracy)

        parts = tokens.reshape(microbatches, -1, LENGTH + 1)
        total, (losses, accuracies) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, dflow.read(model)), parts)
        return (losses.mean(), accuracies.mean()), jax.tree.map(lambda each: each / microbatches, total)

    @dflow.jit
    def step(tokens):
        (loss, accuracy), gradients = accumulated(tokens)
        before = dflow.read(model)
        optimizer.apply(gradients)
        return {"loss": loss, "accuracy": accuracy, **norms(gradients, before, dflow.read(model))}

    return step
