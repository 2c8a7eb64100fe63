"""The policy optimisation of `ppo_in_jax.py` with variables. Its carts, network and loss are imported.

The carts and the random key are state of the worker, and the network is on the parameter tasks. Acting is a loop that
writes the carts, and learning a loop that applies gradients: neither has a carry.
"""

import jax
import jax.numpy as jnp

import dflow
from tests.ports.norms import norms
from tests.ports.ppo_in_jax import (
    EPOCHS,
    LENGTH,
    acted,
    batches,
    in_parts,
    initial_carts,
    initial_parameters,
    loss_of,
    network,
    train,
    transformation,
    with_advantages,
)

__all__ = ["batches", "build", "train"]


def build(cluster, microbatches=1):
    with cluster.parameter_servers():
        model = dflow.variables(initial_parameters(), prefix="ppo/")
        optimizer = dflow.Optimizer(transformation(), model, name="adam")
    carts = dflow.Variable(initial_carts(), name="carts")
    chance = dflow.Generator(jax.random.key(1), name="chance")
    differentiated = dflow.value_and_grad(lambda seen: loss_of(model, seen), model, has_aux=True)

    def act(_, key):
        after, seen = acted(model, carts.read(), key)
        carts.assign(after)
        return None, seen

    def learn(seen):
        def add(total, part):
            found, gradients = differentiated(part)
            return jax.tree.map(jnp.add, total, gradients), found

        before = dflow.read(model)
        total, found = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, before), in_parts(seen, microbatches))
        gradients = jax.tree.map(lambda each: each / microbatches, total)
        optimizer.apply(gradients)
        loss, metrics = jax.tree.map(jnp.mean, found)
        return {"loss": loss, **metrics, **norms(gradients, before, dflow.read(model))}

    @dflow.jit
    def step():
        _, seen = jax.lax.scan(act, None, chance.split(LENGTH))
        flat = with_advantages(seen, network(model, carts.read())[1])
        _, metrics = jax.lax.scan(lambda carry, _: (carry, learn(flat)), None, None, EPOCHS)
        return {"lost": seen["lost"].mean(), **jax.tree.map(lambda each: each[-1], metrics)}

    return step
