"""Actors walk through a corridor and put what they saw into a queue; a learner takes batches out and learns from them.

    python examples/actor_learner.py
    dflow launch --ps 1 --workers 4 --job learner=1 examples/actor_learner.py

Alone, all are threads of one process over the same variables and queue. Launched, each is a process, and the variables
and the queue live on a parameter task. Each actor and the learner is one compiled function with a loop in it that waits
for the queue: a full queue holds the actors back, an empty one the learner.
"""

import argparse
import threading

import jax
import jax.numpy as jnp

import dflow

STATES, GOAL = 8, 7
BATCH = 32

cluster = dflow.connect()
scalar = jax.ShapeDtypeStruct((), jnp.int32)
seen = {"state": scalar, "action": scalar, "reward": jax.ShapeDtypeStruct((), jnp.float32), "after": scalar}
with cluster.parameter_servers():
    transitions = dflow.FIFOQueue(256, seen, name="transitions")
    #: How much reward to expect, by state and action: 0 is a step to the left, 1 to the right. At first too much is
    #: expected of everything, so that everything is tried.
    worth = dflow.Variable(lambda: jnp.ones((STATES, 2)), name="worth")


def walk(state, action):
    """The corridor: a step to either side, and a reward at its end, from where one starts anew."""
    after = jnp.clip(state + 2 * action - 1, 0, GOAL)
    return after, jnp.where(after == GOAL, 1.0, 0.0)


@dflow.jit
def act(key, steps):
    """Walk by the latest worth of each action, half of the time at random, and tell the learner."""

    def step(_, carry):
        state, key = carry
        key, for_choice, for_action = jax.random.split(key, 3)
        best = jnp.argmax(worth[state]).astype(jnp.int32)
        action = jnp.where(
            jax.random.bernoulli(for_choice), jax.random.randint(for_action, (), 0, 2, dtype=jnp.int32), best
        )
        after, reward = walk(state, action)
        transitions.enqueue({"state": state, "action": action, "reward": reward, "after": after})
        return jnp.where(after == GOAL, 0, after), key

    jax.lax.fori_loop(0, steps, step, (jnp.int32(0), key))


def improve(batch):
    """Move the worth of what was done towards the reward and what may be had afterwards; the mean error."""
    future = jnp.where(batch["after"] == GOAL, 0.0, worth.read()[batch["after"]].max(1))
    error = batch["reward"] + 0.9 * future - worth.read()[batch["state"], batch["action"]]
    worth.assign_add(jnp.zeros((STATES, 2)).at[batch["state"], batch["action"]].add(0.03 * error))
    return jnp.abs(error).mean()


@dflow.jit
def learn(batches):
    """Learn from so many batches of the queue; the error of the last."""
    return jax.lax.fori_loop(0, batches, lambda _, last: improve(transitions.dequeue_many(BATCH)), jnp.float32(0))


def best(states):
    """The action that is worth most in each state."""
    return jnp.argmax(worth.read()[states], axis=1)


def exported() -> dflow.Exported:
    """What others need to act, and to go on learning. The queue is of this process, and no part of it."""
    whole, number = dflow.spec("n", jnp.int32), dflow.spec("n", jnp.float32)
    return dflow.export(
        {
            "best": (best, whole),
            "improve": (improve, {"state": whole, "action": whole, "reward": number, "after": whole}),
        }
    )


def steps_to_goal() -> int:
    """How long the learned way is; at most 100 steps are tried."""
    state = steps = 0
    while state != GOAL and steps < 100:
        state = int(walk(state, int(jnp.argmax(worth[state])))[0])
        steps += 1
    return steps


def learn_all(actors: int, steps: int) -> None:
    """Learn from all that so many actors tell."""
    batches = actors * steps // BATCH
    error = learn(batches)
    print(f"learned from {batches * BATCH} transitions of {actors} actors; {int(transitions.size())} are left")
    print(f"the last error is {float(error):.3f}; the goal is {steps_to_goal()} steps away")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=4, help="how many there are; launched, as many as --workers says")
    parser.add_argument("--steps", type=int, default=1600, help="of each actor")
    options = parser.parse_args()
    if cluster.task.startswith("/job:learner/"):
        learn_all(options.actors, options.steps)
    elif cluster.task.startswith("/job:worker/"):
        act(jax.random.key(cluster.index), options.steps)
    else:
        keys = map(jax.random.key, range(options.actors))
        actors = [threading.Thread(target=act, args=(key, options.steps)) for key in keys]
        for actor in actors:
            actor.start()
        learn_all(options.actors, options.steps)
        for actor in actors:
            actor.join()
    cluster.close()


if __name__ == "__main__":
    main()
