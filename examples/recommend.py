"""Predict clicks on films from names; the same command goes on where a killed one was. `clients/recommend.py` asks.

dflow launch --ps 2 --workers 2 --restart on-failure --snapshots run/snapshots examples/recommend.py --folder run
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax

import dflow


def draw(number, count=256):
    """Draw the batch of this number: names of users and films, and the clicks of a hidden model."""
    hidden, drawn = np.random.default_rng(0), np.random.default_rng([1, number])
    user, film = drawn.integers(300, size=count), drawn.integers(100, size=count)
    match = (hidden.normal(size=(300, 2))[user] * hidden.normal(size=(100, 2))[film]).sum(1)
    users = np.array([f"user-{one}" if one > 2 else f"guest-{number}" for one in user])  # guests never come back
    return users, np.array([f"film-{one}" for one in film]), 3 * match + drawn.logistic(size=count) > 0


def train(cluster, strategy, folder, steps):
    with cluster.parameter_servers():  # a name gets a row at its second use, so guests take hardly any
        table = dflow.Embedding(1024, 8, vocabulary=dflow.Vocabulary(admit_after=2), name="names")
        adagrad = dflow.Optimizer(optax.adagrad(0.3, initial_accumulator_value=1e-6), [table], name="adagrad")
    with strategy.variables():  # on the parameter tasks too, but with Hybrid in each worker
        layers = dflow.variables({"hidden": np.random.default_rng(2).normal(size=(16, 32)) / 4, "out": np.zeros(32)})
        adam = dflow.Optimizer(optax.adam(0.01), layers, name="adam")

    def odds(user, film):
        users, films = table(user), table(film)
        return (users * films).sum(1) + jnp.maximum(jnp.hstack([users, films]) @ layers["hidden"], 0) @ layers["out"]

    @dflow.jit
    def train_step(user, film, clicked):
        found = [table.find(user), table.find(film)]  # before the loss: the update gives rows to new names
        loss, (dense, rows) = dflow.value_and_grad(
            lambda: optax.sigmoid_binary_cross_entropy(odds(*found), clicked).mean(), [layers, [table]]
        )()
        adam.apply(dense)
        adagrad.apply(rows, found=found)
        return {"loss": loss}

    def measure(user, film, clicked):
        return {"auc": dflow.metrics.auc(odds(user, film), clicked)}

    evaluation = (measure, [draw(0, 2000)])
    with dflow.CheckpointManager(f"{folder}/checkpoints", [table, adagrad, layers, adam], every=50) as saved:
        trainer = dflow.Trainer(train_step, strategy, evaluation=evaluation, evaluate_every=50, checkpoints=saved)
        auc = trainer.run(lambda number: draw(number + 1), steps=steps, name="train").evaluation["auc"]
    if cluster.elect("export"):
        print("AUC", auc, "odds", odds(["user-3", "nobody"], ["film-7", "film-8"]).tolist(), flush=True)
        dflow.export(odds, *[dflow.spec("b", np.str_)] * 2).save(f"{folder}/model", overwrite=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--folder", default="run")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--strategy", choices=["Async", "Sync", "Hybrid"], default="Async")
    given = options.parse_args()
    cluster = dflow.connect(collectives=given.strategy == "Hybrid")
    train(cluster, getattr(dflow.distributed, given.strategy)(cluster), given.folder, given.steps)
    cluster.close()
