"""The norms that each of these programs reports for a step."""

import jax
import jax.numpy as jnp
import optax


def norms(gradients, before, after):
    """Return the norms of the gradients, of the update, and of the parameters after it."""
    return {
        "gradient_norm": optax.tree.norm(gradients),
        "update_norm": optax.tree.norm(jax.tree.map(jnp.subtract, after, before)),
        "parameter_norm": optax.tree.norm(after),
    }
