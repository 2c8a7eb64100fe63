"""Train on the ten digits, then keep the first layers and learn from few pictures whether a digit is odd.

    python examples/fine_tune.py
    dflow launch --ps 1 --workers 2 examples/fine_tune.py --folder DIR      DIR is the same files for all tasks

The first model is saved whole. Its body is restored by its names into a second model, whose head is new; the body's
variables are not trainable, so no gradient of them is computed or sent. For comparison, the body of a third model stays
as it was drawn at random.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow


def read_digits():
    """Return pictures f32[1797,64] in [0, 1] in a random order, and their digits i32[1797]."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)


def dense(seed, rows, columns):
    """Return the initialisers of a dense layer."""
    key = jax.random.key(seed)
    return {
        "kernel": lambda: jax.random.normal(key, (rows, columns)) * np.sqrt(2 / rows),
        "bias": lambda: jnp.zeros(columns),
    }


def make_model(name, classes, *, trainable_body=True):
    """Return the variables of a body of two layers and of a head."""
    body = {"dense1": dense(1, 64, 128), "dense2": dense(2, 128, 64)}
    return {
        "body": dflow.variables(body, prefix=f"{name}/body/", trainable=trainable_body),
        "head": dflow.variables(dense(3, 64, classes), prefix=f"{name}/head/"),
    }


def predict(model, pictures):
    """Return the logits f32[n,classes]."""
    p = dflow.read(model)
    x = pictures
    for layer in (p["body"]["dense1"], p["body"]["dense2"]):
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ p["head"]["kernel"] + p["head"]["bias"]


def train(cluster, name, model, optimizer, data, steps):
    """Train the variables of `model` that are trainable."""

    @dflow.jit
    def train_step(pictures, labels):
        def loss():
            return optax.softmax_cross_entropy_with_integer_labels(predict(model, pictures), labels).mean()

        value, gradients = dflow.value_and_grad(loss, dflow.trainable_variables(model))()
        optimizer.apply(gradients)
        return {"loss": value}

    batches = dflow.data.batches(data, 32, shuffle=True, epochs=None, drop_remainder=True)
    for _ in dflow.distributed.Async(cluster).run(train_step, lambda step: batches[step], steps=steps, name=name):
        pass
    cluster.barrier(f"trained {name}")


def accuracy(model, pictures, labels):
    """Return the fraction of correct predictions."""
    return float((dflow.jit(predict)(model, pictures).argmax(-1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model")
    parser.add_argument("--pictures", type=int, default=40, help="pictures of the second task")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the checkpoint")
    options = parser.parse_args()

    cluster = dflow.connect()
    with cluster.parameter_servers():
        models = {
            "first": make_model("first", 10),
            "tuned": make_model("tuned", 2, trainable_body=False),
            "random": make_model("random", 2, trainable_body=False),
        }
        optimizers = {
            name: dflow.Optimizer(optax.adam(3e-3), dflow.trainable_variables(model), name=f"{name}_adam")
            for name, model in models.items()
        }
    pictures, digits = read_digits()
    first, second, test = slice(1000), slice(1000, 1000 + options.pictures), slice(-400, None)
    checkpoint = options.folder / "fine_tune_digits"

    train(cluster, "first", models["first"], optimizers["first"], (pictures[first], digits[first]), options.steps)
    if cluster.index == 0:
        dflow.save(checkpoint, models["first"], overwrite=True)
        report = dflow.restore(
            checkpoint,
            models["tuned"]["body"],
            names=lambda name: name.replace("tuned/", "first/"),
            ignore=["unexpected"],  # the head
        )
        print("restored", *report.restored, flush=True)
    cluster.barrier("restored")
    for name in ("tuned", "random"):
        train(cluster, name, models[name], optimizers[name], (pictures[second], digits[second] % 2), options.steps)

    if cluster.elect("evaluation"):
        print(f"which digit: accuracy {accuracy(models['first'], pictures[test], digits[test]):.3f}")
        tuned, random = (accuracy(models[name], pictures[test], digits[test] % 2) for name in ("tuned", "random"))
        print(f"odd or even: accuracy {tuned:.3f} with the restored layers, {random:.3f} with random ones", flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
