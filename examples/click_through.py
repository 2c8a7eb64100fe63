"""Train a click-through model: will this user click on this item? In one process or on a cluster.

    python examples/click_through.py                                  one process
    dflow launch --ps 2 --workers 2 examples/click_through.py         two parameter tasks, two workers, asynchronously

Two towers make vectors of the features of the user and of the item, whose product counts the match; a deep part takes
both and a few numbers. All categorical features share one hashed table of embeddings, divided over the parameter tasks:
of it only the rows of a batch travel. The data is drawn from a hidden model, since no package ships real clicks. So the
best possible AUC is known, and printed beside that of the model.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

ROWS, DIM, TOWER, DEEP = 50_000, 16, 16, 64
USERS, ITEMS, TOPICS = 2_000, 1_000, 50
#: Most topics that a user has seen; shorter lists are filled up with the weight 0.
HISTORY = 5


def hashed(feature: int, values: np.ndarray) -> np.ndarray:
    """The rows of a feature's values in the table that all features share; two values may get the same row."""
    mixed = (values.astype(np.uint64) * np.uint64(64) + np.uint64(feature)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(ROWS)).astype(np.int32)


def draw(number: int, count: int) -> dict[str, np.ndarray]:
    """Draw the batch of this number: features, clicks, and the log odds of the clicks."""
    hidden, draw = np.random.default_rng(0), np.random.default_rng([1, number])
    tastes, topic_of_item = hidden.normal(size=(TOPICS, 8)), hidden.integers(TOPICS, size=ITEMS)
    quality, activity = hidden.normal(size=ITEMS), hidden.normal(size=USERS)
    user, item = draw.integers(USERS, size=count), (ITEMS ** draw.random(count)).astype(int)
    seen, length = draw.integers(TOPICS, size=(count, HISTORY)), draw.integers(1, HISTORY + 1, size=count)
    weights = (np.arange(HISTORY) < length[:, None]).astype(np.float32)
    numbers = draw.normal(size=(count, 3)).astype(np.float32)
    taste = (tastes[seen] * weights[..., None]).sum(1) / length[:, None]
    match = (taste * tastes[topic_of_item[item]]).sum(1)
    odds = 0.7 * match + quality[item] + 0.5 * activity[user] + numbers @ [0.5, -0.3, 0.2] - 1
    return {
        "user": hashed(0, user),
        "history": hashed(1, seen),
        "history_weights": weights,
        "item": hashed(2, item),
        "topic": hashed(3, topic_of_item[item]),
        "numbers": numbers,
        "clicked": (draw.random(count) < 1 / (1 + np.exp(-odds))).astype(np.float32),
        "odds": odds.astype(np.float32),
    }


def dense(seed: int, inputs: int, outputs: int) -> dict:
    """The initial values of a layer, computed where the variables live."""
    draw = jax.nn.initializers.he_normal()
    return {"kernel": lambda: draw(jax.random.key(seed), (inputs, outputs)), "bias": lambda: jnp.zeros(outputs)}


def make_model() -> dict:
    """The table and the layers, as variables."""
    layers = {
        "user": dense(1, 2 * DIM, TOWER),
        "item": dense(2, 2 * DIM, TOWER),
        "deep": dense(3, 2 * TOWER + 3, DEEP),
        "odds": dense(4, DEEP + 1, 1),
    }
    return {"table": dflow.Embedding(ROWS, DIM, name="table"), "layers": dflow.variables(layers)}


def log_odds(model: dict, batch: dict) -> jax.Array:
    """The log odds f32[n] of a click."""
    table, layers = model["table"], dflow.read(model["layers"])

    def layer(name: str, *parts: jax.Array) -> jax.Array:
        return jnp.concatenate(parts, 1) @ layers[name]["kernel"] + layers[name]["bias"]

    history = table.bag(batch["history"], weights=batch["history_weights"], combine="mean")
    user = layer("user", table(batch["user"]), history)
    item = layer("item", table(batch["item"]), table(batch["topic"]))
    deep = jax.nn.relu(layer("deep", user, item, batch["numbers"]))
    return layer("odds", deep, (user * item).sum(1, keepdims=True))[:, 0]


def auc(odds: np.ndarray, clicked: np.ndarray) -> float:
    """Probability that a clicked example has larger odds than another one."""
    ranks = np.empty(len(odds))
    ranks[np.argsort(odds)] = np.arange(1, len(odds) + 1)
    clicks = int(clicked.sum())
    return float((ranks[clicked == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(odds) - clicks)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000, help="training steps of all workers together")
    options.add_argument("--batch", type=int, default=256, help="examples in a batch")
    given = options.parse_args()
    cluster = dflow.connect()
    with cluster.parameter_servers():
        model = make_model()
        optimizer = dflow.Optimizer(optax.adagrad(0.1, initial_accumulator_value=1e-6), model, name="adagrad")

    @dflow.jit
    def train_step(batch: dict) -> dict:
        def loss() -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(log_odds(model, batch), batch["clicked"]).mean()

        value, gradients = dflow.value_and_grad(loss, model)()
        optimizer.apply(gradients)
        return {"loss": value}

    # The ids of a worker's next batch are sent while its present step runs.
    strategy = dflow.distributed.Async(cluster, lookahead=True)
    # Batch 0 is held out. The number of a step determines its batch, whichever worker does it.
    run = strategy.run(train_step, lambda step: draw(step + 1, given.batch), steps=given.steps)
    for number, metrics in enumerate(run, 1):
        if number % 250 == 0:
            print(f"{number:5d} steps done here, loss {metrics['loss']:.4f}", flush=True)

    if cluster.elect("evaluation"):
        held_out = draw(0, 10_000)
        odds = np.asarray(dflow.jit(lambda batch: log_odds(model, batch))(held_out))
        clicked = held_out["clicked"]
        logloss = float(optax.sigmoid_binary_cross_entropy(odds, clicked).mean())
        best = auc(held_out["odds"], clicked)
        print(f"held-out AUC {auc(odds, clicked):.4f} (best possible {best:.4f}), logloss {logloss:.4f}", flush=True)
        cluster.report("AUC", auc(odds, clicked))
    cluster.close()


if __name__ == "__main__":
    main()
