"""Recommend films from names: a table whose rows are given to the names as they come, in one process or on a cluster.

    python examples/recommend.py --export model
    dflow launch --ps 2 --workers 2 examples/recommend.py --export model
    dflow serve model                  # a client sends names, as strings (BYTES)

Users and films are strings, and no list of them is needed: a table with a vocabulary gives a row to each name that is
used. Few rows are enough for the names that are used often; the names of users that came once share rows. The ratings
are drawn from a hidden model.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax

import dflow

USERS, FILMS, DIM = 300, 100, 8


def draw(number: int, count: int = 256) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the batch of this number: names of users and of films, and ratings around 3."""
    hidden, drawn = np.random.default_rng(0), np.random.default_rng([1, number])
    tastes, kinds = hidden.normal(size=(USERS, 2)), hidden.normal(size=(FILMS, 2))
    user, film = drawn.integers(USERS, size=count), drawn.integers(FILMS, size=count)
    ratings = 3 + (tastes[user] * kinds[film]).sum(1) + 0.1 * drawn.normal(size=count)
    users = np.array([f"user-{one}" for one in user])
    users[:4] = [f"guest-{number}-{one}" for one in range(4)]  # users that never come back
    return users, np.array([f"film-{one}" for one in film]), ratings.astype(np.float32)


def make_step(table: dflow.Embedding, optimizer: dflow.Optimizer):
    """Return the compiled step of training."""

    @dflow.jit
    def train_step(users, films, ratings):
        found = [table.find(users), table.find(films)]  # before the loss: it returns rows, and changes nothing

        def loss():
            predicted = 3 + (table(found[0]) * table(found[1])).sum(-1)
            return jnp.mean((predicted - ratings) ** 2)

        value, gradients = dflow.value_and_grad(loss, [table])()
        optimizer.apply(gradients, found=found)  # the update gives rows to new names
        return {"loss": value}

    return train_step


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=300, help="training steps of all workers together")
    options.add_argument("--strategy", choices=["Async", "Sync", "Hybrid"], default="Async")
    options.add_argument("--export", help="the folder to export the trained model to")
    given = options.parse_args()
    cluster = dflow.connect(collectives=given.strategy == "Hybrid")
    with cluster.parameter_servers():
        # A name gets a row at its second use, so guests take hardly any.
        table = dflow.Embedding(1024, DIM, vocabulary=dflow.Vocabulary(admit_after=2), name="names")
        optimizer = dflow.Optimizer(optax.adagrad(0.3, initial_accumulator_value=1e-6), [table], name="adagrad")

    def rate(user, film):
        return {"rating": 3 + (table(user) * table(film)).sum(-1)}

    strategy = getattr(dflow.distributed, given.strategy)(cluster)
    [*strategy.run(make_step(table, optimizer), lambda step: draw(step + 1), steps=given.steps)]
    if cluster.elect("evaluation"):
        users, films, ratings = draw(0)
        predicted = rate(users, films)["rating"]  # outside of training: rows of names, without a gradient
        print(f"held-out error {np.mean((predicted - ratings)[4:] ** 2):.3f}; of the mean {ratings.var():.3f}")
        print(table.counts(), flush=True)
        if given.export:
            dflow.export(rate, dflow.spec("b", np.str_), dflow.spec("b", np.str_)).save(given.export)
    cluster.close()


if __name__ == "__main__":
    main()
