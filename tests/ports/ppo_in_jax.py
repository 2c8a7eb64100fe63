"""Proximal policy optimisation of a pole on a cart, in plain JAX: the carts move on from one step to the next."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.ports.norms import norms

CARTS, LENGTH, HIDDEN, EPOCHS, STEPS = 16, 16, 16, 3, 50
DISCOUNT, TRACE, CLIP = 0.98, 0.95, 0.2


def initial_parameters():
    drawn = np.random.default_rng(0)

    def layer(size_in, size_out, scale):
        w = drawn.normal(size=(size_in, size_out)) * scale
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(size_out)}

    return {
        "hidden": layer(4, HIDDEN, 0.5),
        "policy": layer(HIDDEN, 2, 0.1),
        "value": layer(HIDDEN, 1, 0.5),
    }


def initial_carts():
    return jnp.asarray(np.random.default_rng(0).uniform(-0.05, 0.05, (CARTS, 4)), jnp.float32)


def rolled(carts, actions, key):
    """Push each cart left or right. Return the states and the carts that lost their pole; these start again."""
    _, speed, angle, turning = carts.T
    push = jnp.where(actions == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    pushed = (push + 0.05 * turning**2 * sine) / 1.1
    turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    sped = pushed - 0.05 * turned * cosine / 1.1
    after = carts + 0.02 * jnp.stack([speed, sped, turning, turned], axis=1)
    lost = (jnp.abs(after[:, 0]) > 2.4) | (jnp.abs(after[:, 2]) > 0.2)
    again = jax.random.uniform(key, carts.shape, minval=-0.05, maxval=0.05)
    return jnp.where(lost[:, None], again, after), lost


def network(params, carts):
    """Return the logits of both actions, and the expected reward."""
    hidden = jnp.tanh(carts @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["policy"]["w"] + params["policy"]["b"]
    return logits, (hidden @ params["value"]["w"] + params["value"]["b"])[..., 0]


def acted(params, carts, key):
    """Do a step of all carts; return the new states, and the experience to learn from."""
    for_action, for_cart = jax.random.split(key)
    logits, value = network(params, carts)
    actions = jax.random.categorical(for_action, logits)
    after, lost = rolled(carts, actions, for_cart)
    likelihood = likelihood_of(logits, actions)
    return after, {"carts": carts, "actions": actions, "value": value, "likelihood": likelihood, "lost": lost}


def likelihood_of(logits, actions):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], axis=-1)[..., 0]


def with_advantages(seen, last_value):
    """Return the experience with advantages: the rewards above the expected ones (generalised advantages)."""

    def back(carry, step):
        following, advantage = carry
        going_on = 1.0 - step["lost"]
        error = going_on + DISCOUNT * going_on * following - step["value"]
        advantage = error + DISCOUNT * TRACE * going_on * advantage
        return (step["value"], advantage), advantage

    first = (last_value, jnp.zeros_like(last_value))
    _, advantages = jax.lax.scan(back, first, seen, reverse=True)
    flat = {**seen, "advantages": advantages, "returns": advantages + seen["value"]}
    return jax.tree.map(lambda each: each.reshape(LENGTH * CARTS, *each.shape[2:]), flat)


def loss_of(params, seen):
    logits, value = network(params, seen["carts"])
    ratio = jnp.exp(likelihood_of(logits, seen["actions"]) - seen["likelihood"])
    gain = jnp.minimum(ratio * seen["advantages"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * seen["advantages"])
    chances = jax.nn.softmax(logits)
    entropy = -(chances * jnp.log(chances)).sum(axis=-1).mean()
    error = ((value - seen["returns"]) ** 2).mean()
    metrics = {"entropy": entropy, "value_error": error, "clipped": (jnp.abs(ratio - 1) > CLIP).mean()}
    return -gain.mean() + 0.01 * error - 0.01 * entropy, metrics


def transformation():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))


def in_parts(seen, microbatches):
    """Return the experience, divided into equal parts along a new first axis."""
    return jax.tree.map(lambda each: each.reshape(microbatches, -1, *each.shape[1:]), seen)


def train(microbatches=1):
    params, carts, key = initial_parameters(), initial_carts(), jax.random.key(1)
    optimizer = transformation()
    state = optimizer.init(params)
    differentiated = jax.value_and_grad(loss_of, has_aux=True)

    def learned(carry, _, seen):
        params, state = carry

        def add(total, part):
            found, gradients = differentiated(params, part)
            return jax.tree.map(jnp.add, total, gradients), found

        total, found = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), in_parts(seen, microbatches))
        gradients = jax.tree.map(lambda each: each / microbatches, total)
        updates, state = optimizer.update(gradients, state, params)
        after = optax.apply_updates(params, updates)
        loss, metrics = jax.tree.map(jnp.mean, found)
        return (after, state), {"loss": loss, **metrics, **norms(gradients, params, after)}

    @jax.jit
    def step(params, state, carts, key):
        key, *keys = jax.random.split(key, 1 + LENGTH)
        carts, seen = jax.lax.scan(lambda carts, key: acted(params, carts, key), carts, jnp.stack(keys))
        flat = with_advantages(seen, network(params, carts)[1])
        (params, state), metrics = jax.lax.scan(lambda *carry: learned(*carry, flat), (params, state), None, EPOCHS)
        return params, state, carts, key, {"lost": seen["lost"].mean(), **jax.tree.map(lambda each: each[-1], metrics)}

    for _ in range(STEPS):
        params, state, carts, key, metrics = step(params, state, carts, key)
        yield metrics


def batches():
    """Empty batches: the experience comes from acting within the step."""
    return [()] * STEPS
