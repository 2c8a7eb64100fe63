"""Train a Keras 3 model with an embedding table on parameter tasks, in one process or on a cluster.

    python examples/libraries/with_keras.py --save clicks.keras
    dflow launch --ps 2 --workers 2 examples/libraries/with_keras.py --save clicks.keras

The model predicts from hashed features whether an item is clicked, as those of a hidden model. Its table is divided
over the parameter tasks, its dense layers live there too, and the optimizers are Keras's Adam for the layers and
Adagrad for the table. `--save` writes an ordinary file of Keras with the trained weights.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import optax

import dflow
import dflow.keras

ROWS, FEATURES = 2_000, 4


def draw(number: int, count: int = 128) -> tuple:
    """Draw the batch of this number: ids i32[count, FEATURES], and clicks f32[count, 1]."""
    hidden, drawn = np.random.default_rng(0).normal(size=ROWS), np.random.default_rng([1, number])
    ids = drawn.integers(ROWS, size=(count, FEATURES), dtype=np.int32)
    clicked = drawn.random(count) < 1 / (1 + np.exp(-2 * hidden[ids].sum(1)))
    return ids, clicked[:, None].astype(np.float32)


def make_model() -> keras.Model:
    """Embed, concatenate, classify."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int32"),
            dflow.keras.ShardedEmbedding(ROWS, 8, name="words"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(1, activation="sigmoid", name="click"),
        ],
        name="clicks",
    )
    model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1500, help="training steps of all workers together")
    options.add_argument("--save", metavar="FILE.keras", help="save the trained model here")
    given = options.parse_args()
    cluster = dflow.connect()
    with cluster.parameter_servers():
        model = dflow.keras.Model(make_model(), tables=optax.adagrad(0.2, initial_accumulator_value=1e-6))
    run = dflow.distributed.Async(cluster).run(model.train_step, lambda step: draw(step + 1), steps=given.steps)
    for number, metrics in enumerate(run, 1):
        if number % 250 == 0:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print(f"{number:5d} steps done here, {shown}", flush=True)
    if cluster.elect("evaluation"):
        trained = model.to_keras()
        trained.compile(loss="binary_crossentropy", metrics=["accuracy", "auc"])
        found = trained.evaluate(*draw(0, 4096), batch_size=1024, verbose=0, return_dict=True)
        print(f"held-out accuracy {found['accuracy']:.4f}, AUC {found['auc']:.4f}", flush=True)
        if given.save:
            trained.save(given.save)
    cluster.close()


if __name__ == "__main__":
    main()
