"""Train a small convolutional network on scikit-learn's handwritten digits, in one process or on a cluster.

    python examples/digits.py                                   one process
    dflow launch --ps 2 --workers 3 examples/digits.py          two parameter tasks and three workers, asynchronously

The lines are the same: on a cluster the variables live on the parameter tasks, and so do the updates.
"""

import argparse
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow


def read_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the training and the test split: images f32[n,8,8,1] in [0, 1], labels i32[n]. A fifth is held out."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    held_out = len(order) // 5
    return (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])


def normal(seed: int, *shape: int) -> Callable[[], jax.Array]:
    """An initialiser, run where the variable lives."""
    fan_in = int(np.prod(shape[:-1]))
    return lambda: jax.random.normal(jax.random.key(seed), shape) * np.sqrt(2 / fan_in)


def zeros(*shape: int) -> Callable[[], jax.Array]:
    """An initialiser, run where the variable lives."""
    return lambda: jnp.zeros(shape)


def make_model() -> dict:
    """Two convolutions and two dense layers, as variables."""
    return dflow.variables(
        {
            "conv1": {"kernel": normal(0, 3, 3, 1, 16), "bias": zeros(16)},
            "conv2": {"kernel": normal(1, 3, 3, 16, 32), "bias": zeros(32)},
            "dense": {"kernel": normal(2, 4 * 4 * 32, 64), "bias": zeros(64)},
            "logits": {"kernel": normal(3, 64, 10), "bias": zeros(10)},
        }
    )


def predict(model: dict, images: jax.Array) -> jax.Array:
    """Return the logits f32[n,10] of images f32[n,8,8,1]."""
    p = dflow.read(model)
    x = images
    for layer, stride in ((p["conv1"], 1), (p["conv2"], 2)):
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["bias"])
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ p["dense"]["kernel"] + p["dense"]["bias"])
    return x @ p["logits"]["kernel"] + p["logits"]["bias"]


def make() -> tuple[dict, dflow.Optimizer]:
    """Return the model and its optimizer."""
    model = make_model()
    return model, dflow.Optimizer(optax.adam(1e-3), model, name="adam")


def make_steps(model: dict, optimizer: dflow.Optimizer) -> tuple[Callable, Callable]:
    """Return a step of training and the accuracy of a batch, both compiled."""

    @dflow.jit
    def train_step(images, labels):
        def loss():
            logits = predict(model, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = dflow.value_and_grad(loss, model)()
        optimizer.apply(gradients)
        return {"loss": value}

    @dflow.jit
    def accuracy(images, labels):
        return (predict(model, images).argmax(-1) == labels).mean()

    return train_step, accuracy


def exported(model: dict, optimizer: dflow.Optimizer) -> dflow.Exported:
    """Export the functions to serve the model, to continue training it, and to test it, for batches of any size."""
    train_step, accuracy = make_steps(model, optimizer)
    images, labels = dflow.spec("n, 8, 8, 1", jnp.float32), dflow.spec("n", jnp.int32)
    return dflow.export(
        {
            "predict": (predict, model, images),
            "train_step": (train_step, images, labels),
            "accuracy": (accuracy, images, labels),
        }
    )


def shuffled(images: np.ndarray, labels: np.ndarray, *, size: int, seed: int) -> Iterator[tuple]:
    """Yield random batches without end, drawn from `seed`."""
    order = np.random.default_rng(seed)
    while True:
        chosen = order.choice(len(labels), size, replace=False)
        yield images[chosen], labels[chosen]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1500, help="training steps of all workers together")
    options.add_argument("--batch", type=int, default=64, help="images in a batch")
    options.add_argument("--export", metavar="DIR", help="export what was trained, where one process trains alone")
    given = options.parse_args()

    training, test = read_digits()
    cluster = dflow.connect()
    with cluster.parameter_servers():
        model, optimizer = make()
    train_step, accuracy = make_steps(model, optimizer)

    batches = shuffled(*training, size=given.batch, seed=cluster.index)
    strategy = dflow.distributed.Async(cluster)
    for number, metrics in enumerate(strategy.run(train_step, batches, steps=given.steps), 1):
        if number % 250 == 0:
            print(f"{number:5d} steps done here, loss {metrics['loss']:.4f}", flush=True)

    if cluster.elect("evaluation"):
        result = float(accuracy(*test))
        print(f"test accuracy {result:.4f} on {len(test[1])} held-out images", flush=True)
        cluster.report("test accuracy", result)
    if given.export:
        print(exported(model, optimizer).save(given.export))
    cluster.close()


if __name__ == "__main__":
    main()
