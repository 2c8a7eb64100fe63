"""Actors walk through a corridor and enqueue their transitions; a learner dequeues batches and learns from them.

    python examples/actor_learner.py
    dflow launch --ps 1 --workers 4 --job learner=1 examples/actor_learner.py

Standalone, all are threads of one process over the same variables and queue. Launched, each is a process, and the
variables and the queue live on a parameter task. Each actor and the learner is one compiled function with a loop that
waits for the queue: the actors wait while it is full, the learner while it is empty.
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
    #: Expected reward by state and action: 0 is a step to the left, 1 to the right. The initial values are too high, so
    #: that every action is tried.
    worth = dflow.Variable(lambda: jnp.ones((STATES, 2)), name="worth")


def walk(state, action):
    """The corridor: a step to either side, and a reward at its end, where an episode ends."""
    after = jnp.clip(state + 2 * action - 1, 0, GOAL)
    return after, jnp.where(after == GOAL, 1.0, 0.0)


@dflow.jit
def act(key, steps):
    """Walk by the latest values of the actions, half of the time at random, and enqueue the transitions."""

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
    """Move the values of the actions taken towards the reward plus the discounted future; return the mean error."""
    future = jnp.where(batch["after"] == GOAL, 0.0, worth.read()[batch["after"]].max(1))
    error = batch["reward"] + 0.9 * future - worth.read()[batch["state"], batch["action"]]
    worth.assign_add(jnp.zeros((STATES, 2)).at[batch["state"], batch["action"]].add(0.03 * error))
    return jnp.abs(error).mean()


@dflow.jit
def learn(batches):
    """Learn from `batches` batches of the queue; return the error of the last."""
    return jax.lax.fori_loop(0, batches, lambda _, last: improve(transitions.dequeue_many(BATCH)), jnp.float32(0))


def best(states):
    """Return the action with the highest value in each state."""
    return jnp.argmax(worth.read()[states], axis=1)


def exported() -> dflow.Exported:
    """Export the functions to act and to continue learning, without the queue, which belongs to this process."""
    whole, number = dflow.spec("n", jnp.int32), dflow.spec("n", jnp.float32)
    return dflow.export(
        {
            "best": (best, whole),
            "improve": (improve, {"state": whole, "action": whole, "reward": number, "after": whole}),
        }
    )


def steps_to_goal() -> int:
    """Return the length of the learned way, at most 100 steps."""
    state = steps = 0
    while state != GOAL and steps < 100:
        state = int(walk(state, int(jnp.argmax(worth[state])))[0])
        steps += 1
    return steps


def learn_all(actors: int, steps: int) -> None:
    """Learn from all transitions of `actors` actors with `steps` steps each."""
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
