"""Matrix factorisation in plain JAX: a rating is the product of a row of users and a row of items."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.ports.norms import norms

USERS, ITEMS, RANK, BATCH, STEPS, PENALTY = 60, 40, 6, 64, 50, 1e-3


def initial_parameters():
    drawn = np.random.default_rng(0)

    def table(count):
        rows = drawn.normal(size=(count, RANK)) / 2
        return {"rows": jnp.asarray(rows, jnp.float32), "bias": jnp.zeros(count)}

    return {"users": table(USERS), "items": table(ITEMS), "mean": jnp.zeros(())}


def loss_of(params, users, items, ratings):
    """Return the squared error with a penalty on the used rows, and the fraction of ratings within a half."""
    user, item = params["users"]["rows"][users], params["items"]["rows"][items]
    bias = params["users"]["bias"][users] + params["items"]["bias"][items] + params["mean"]
    error = (user * item).sum(axis=-1) + bias - ratings
    penalty = PENALTY * ((user**2).sum() + (item**2).sum())
    return (error**2).mean() + penalty, (jnp.abs(error) < 0.5).mean()


def transformation():
    return optax.chain(optax.clip_by_global_norm(2.0), optax.adagrad(0.3))


def batches():
    """Ratings of hidden rows; a few users and items have most of them, so rows repeat within a batch."""
    drawn = np.random.default_rng(0)
    user_rows, item_rows = drawn.normal(size=(USERS, 3)), drawn.normal(size=(ITEMS, 3))
    for _ in range(STEPS):
        users = (USERS * drawn.random(BATCH) ** 2).astype(np.int32)
        items = (ITEMS * drawn.random(BATCH) ** 2).astype(np.int32)
        yield users, items, (3 + (user_rows[users] * item_rows[items]).sum(axis=1)).astype(np.float32)


def train(microbatches=1):
    params = initial_parameters()
    optimizer = transformation()
    state = optimizer.init(params)
    differentiated = jax.value_and_grad(loss_of, has_aux=True)

    @jax.jit
    def step(params, state, *batch):
        parts = zip(*(jnp.split(array, microbatches) for array in batch), strict=True)
        found = [differentiated(params, *part) for part in parts]
        (loss, accuracy), gradients = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        updates, state = optimizer.update(gradients, state, params)
        after = optax.apply_updates(params, updates)
        return after, state, {"loss": loss, "accuracy": accuracy, **norms(gradients, params, after)}

    for batch in batches():
        params, state, metrics = step(params, state, *batch)
        yield metrics
