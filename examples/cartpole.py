"""Actors balance the poles of Gymnasium's CartPole and enqueue what they saw; a learner improves their policy.

    python examples/cartpole.py
    dflow launch --ps 1 --workers 2 --job learner=1 examples/cartpole.py

Standalone, all are threads of one process over the same variables and queue. Launched, each is a process, and the
variables and the queue live on a parameter task. The environment is plain Python: an actor fetches the policy, plays
some steps by it, and puts them into the queue, which makes it wait while the learner is behind. The learner is one
compiled step of advantage actor-critic (A2C); it closes the queue when it is done, and this ends the actors.
"""

import argparse
import collections
import contextlib
import threading

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

CARTS, STEPS = 8, 32  #: carts of an actor, and the steps of each in an element of the queue
DISCOUNT, SCALE = 0.98, 10.0  #: of rewards; of the network's estimate of the discounted reward

cluster = dflow.connect()
normal = jax.nn.initializers.lecun_normal()
of_steps = {
    "observation": jax.ShapeDtypeStruct((STEPS, CARTS, 4), jnp.float32),
    "action": jax.ShapeDtypeStruct((STEPS, CARTS), jnp.int32),
    "reward": jax.ShapeDtypeStruct((STEPS, CARTS), jnp.float32),
    #: Whether the episode ended with this step, and whether this step only sets the cart up again, after an end.
    "done": jax.ShapeDtypeStruct((STEPS, CARTS), jnp.bool_),
    "void": jax.ShapeDtypeStruct((STEPS, CARTS), jnp.bool_),
}
with cluster.parameter_servers():
    trajectories = dflow.FIFOQueue(
        4, {"steps": of_steps, "last": jax.ShapeDtypeStruct((CARTS, 4), jnp.float32)}, name="trajectories"
    )
    policy = dflow.variables(
        {
            "hidden": {"kernel": lambda: normal(jax.random.key(0), (4, 64)), "bias": lambda: jnp.zeros(64)},
            "out": {"kernel": lambda: normal(jax.random.key(1), (64, 3)), "bias": lambda: jnp.zeros(3)},
        },
        prefix="policy/",
    )
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)), policy, name="adam")


def make_carts():
    """Return an environment of several carts; a cart whose episode has ended is set up again in the next step."""
    return gymnasium.make_vec("CartPole-v1", num_envs=CARTS, vectorization_mode="vector_entry_point")


def network(weights, observation):
    """Return the logits f32[...,2] of the two actions, and the expected reward f32[...]."""
    hidden = jnp.tanh(observation @ weights["hidden"]["kernel"] + weights["hidden"]["bias"])
    out = hidden @ weights["out"]["kernel"] + weights["out"]["bias"]
    return out[..., :2], SCALE * out[..., 2]


@dflow.jit
def fetch():
    """Return the values of the policy: compiled, they come in one message."""
    return dflow.read(policy)


@jax.jit
def choose(weights, observation, seed):
    """Return an action i32[n] for each observation, drawn by the policy's probabilities."""
    return jax.random.categorical(jax.random.key(seed), network(weights, observation)[0]).astype(jnp.int32)


def act(number):
    """Play until the queue is closed."""
    carts = make_carts()
    seeds = np.random.default_rng(number)
    observation, _ = carts.reset(seed=number)
    void = np.zeros(CARTS, bool)
    with contextlib.suppress(dflow.QueueClosed):
        while True:
            weights, steps = fetch(), []
            for _ in range(STEPS):
                action = np.asarray(choose(weights, observation, seeds.integers(2**31)))
                after, reward, terminated, truncated, _ = carts.step(action)
                done = terminated | truncated
                step = {"observation": observation, "action": action, "reward": reward, "done": done, "void": void}
                steps.append(step)
                observation, void = after, done
            trajectories.enqueue({"steps": jax.tree.map(lambda *rows: np.stack(rows), *steps), "last": observation})
    carts.close()


@dflow.jit
def learn():
    """Improve the policy by an element of the queue; return how many steps counted, and how many episodes ended."""
    element = trajectories.dequeue()
    seen, counts = element["steps"], 1.0 - element["steps"]["void"]

    def loss():
        weights = dflow.read(policy)
        logits, expected = network(weights, seen["observation"])

        def back(future, step):
            reward, done = step
            total = reward + DISCOUNT * jnp.where(done, 0.0, future)
            return total, total

        last = jax.lax.stop_gradient(network(weights, element["last"])[1])
        _, totals = jax.lax.scan(back, last, (seen["reward"], seen["done"]), reverse=True)
        advantage = (totals - expected) / SCALE
        cost = optax.softmax_cross_entropy_with_integer_labels(logits, seen["action"])
        each = cost * jax.lax.stop_gradient(advantage) + advantage**2
        return (each * counts).sum() / counts.sum()

    optimizer.apply(dflow.grad(loss, policy)())
    return counts.sum(), seen["done"].sum()


def learn_all(updates):
    """Learn from `updates` elements of the queue, and end the actors."""
    newest = collections.deque(maxlen=50)
    try:
        for number in range(1, updates + 1):
            newest.append(learn())
            if number % 50 == 0:
                steps, episodes = np.sum(newest, axis=0)
                print(f"{number:4d} updates; a pole stays up for {steps / max(1, episodes):.1f} steps", flush=True)
    finally:
        trajectories.close(cancel_pending=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=600, help="of the policy")
    parser.add_argument("--actors", type=int, default=2, help="threads; launched, there are as many as --workers says")
    options = parser.parse_args()
    if cluster.task.startswith("/job:learner/"):
        learn_all(options.updates)
    elif cluster.task.startswith("/job:worker/"):
        act(cluster.index)
    else:
        actors = [threading.Thread(target=act, args=(number,)) for number in range(options.actors)]
        for actor in actors:
            actor.start()
        learn_all(options.updates)
        for actor in actors:
            actor.join()
    cluster.close()


if __name__ == "__main__":
    main()
