"""Fill in hidden pixels of handwritten digits by matrix factorisation, in one process or on a cluster.

    python examples/factorisation.py
    dflow launch --ps 2 --workers 3 examples/factorisation.py

No package ships ratings, so scikit-learn's digits are the matrix: 1797 pictures for users, 64 pixels for items, and the
brightness from 0 to 16 for a rating. A tenth of them is hidden. A brightness is predicted as the product of a row of
each table, plus a bias of each. On a cluster the tables are divided over the parameter tasks, and only the rows of a
batch and their gradients travel.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow

RANK = 12


def read_ratings():
    """Return the known and the hidden ratings, each dict of picture i32[n], pixel i32[n] and brightness f32[n]."""
    matrix = load_digits().data.astype(np.float32)
    picture, pixel = np.indices(matrix.shape, np.int32).reshape(2, -1)
    ratings = {"picture": picture, "pixel": pixel, "brightness": matrix.reshape(-1)}
    order = np.random.default_rng(0).permutation(matrix.size)
    hidden = matrix.size // 10
    return ({name: column[part] for name, column in ratings.items()} for part in (order[hidden:], order[:hidden]))


def make_model():
    """Two tables of rows with a bias each."""
    pictures = dflow.Embedding(1797, RANK, name="pictures")
    pixels = dflow.Embedding(64, RANK, name="pixels")
    return {
        "pictures": pictures,
        "pixels": pixels,
        "picture bias": dflow.ShardedVariable(lambda: jnp.zeros(1797), near=pictures, name="picture_bias"),
        "pixel bias": dflow.ShardedVariable(lambda: jnp.zeros(64), near=pixels, name="pixel_bias"),
    }


def predict(model, ratings):
    """Return the predicted brightness f32[n] of pixels of pictures."""
    picture, pixel = ratings["picture"], ratings["pixel"]
    product = (model["pictures"](picture) * model["pixels"](pixel)).sum(-1)
    return product + model["picture bias"][picture] + model["pixel bias"][pixel]


def squared_error(model, ratings):
    """Return the mean squared error of the predictions."""
    return ((predict(model, ratings) - ratings["brightness"]) ** 2).mean()


def error_of_means(known, hidden):
    """Return the error of predicting each pixel by its mean over the pictures that show it."""
    totals = np.bincount(known["pixel"], known["brightness"])
    means = totals / np.bincount(known["pixel"])
    return np.sqrt(((means[hidden["pixel"]] - hidden["brightness"]) ** 2).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="training steps of all workers together")
    parser.add_argument("--batch", type=int, default=1024, help="ratings in a batch")
    options = parser.parse_args()

    known, hidden = read_ratings()
    cluster = dflow.connect()
    with cluster.parameter_servers():
        model = make_model()
        optimizer = dflow.Optimizer(optax.adagrad(0.5), model, name="adagrad")

    @dflow.jit
    def train_step(ratings):
        loss, gradients = dflow.value_and_grad(lambda: squared_error(model, ratings), model)()
        optimizer.apply(gradients)
        return {"loss": loss}

    # By number: whichever worker does a step, each rating is used once in an epoch.
    batches = dflow.data.batches(known, options.batch, shuffle=True, epochs=None, drop_remainder=True)
    strategy = dflow.distributed.Async(cluster)
    for number, metrics in enumerate(strategy.run(train_step, lambda step: batches[step], steps=options.steps), 1):
        if number % 250 == 0:
            print(f"{number:5d} steps done here, loss {metrics['loss']:.2f}", flush=True)

    if cluster.elect("evaluation"):
        result = float(dflow.jit(squared_error)(model, hidden)) ** 0.5
        print(f"error {result:.2f} on {len(hidden['pixel'])} hidden pixels", end="; ")
        print(f"of the mean of each pixel {error_of_means(known, hidden):.2f}", flush=True)
        cluster.report("error on hidden pixels", result)
    cluster.close()


if __name__ == "__main__":
    main()
