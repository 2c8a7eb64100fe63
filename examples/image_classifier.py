"""Train a convolutional network with batch normalization on scikit-learn's handwritten digits, by all-reduce.

    python examples/image_classifier.py                             all devices of one process
    dflow launch --ps 0 --workers 2 examples/image_classifier.py    all devices of two processes

Each worker gives its part of a batch, and the step sees the whole batch: the statistics of the batch normalization are
those of the images of all workers, and the results are those of one process.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow

#: Weight of the present batch in the moving statistics.
MOMENTUM = 0.1


def read_digits():
    """Return the training and the test split: images f32[n,8,8,1] in [0, 1], labels i32[n]. A fifth is held out."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    held_out = len(order) // 5
    return (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])


def normal(seed, shape):
    """Return an initialiser, which each device runs for its part of the variable."""
    fan_in = int(np.prod(shape[:-1]))
    return lambda: jax.random.normal(jax.random.key(seed), shape) * np.sqrt(2 / fan_in)


def convolution(seed, channels_in, channels):
    """Return the variables of a convolution and of the batch normalization after it."""
    trained = {
        "kernel": normal(seed, (3, 3, channels_in, channels)),
        "scale": jnp.ones(channels),
        "offset": jnp.zeros(channels),
    }
    moving = {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}
    name = f"convolution {seed}/"
    return dflow.variables(trained, prefix=name) | dflow.variables(moving, prefix=name, trainable=False)


def make_model():
    """Return two convolutions and a dense layer."""
    return {
        "convolutions": [convolution(0, 1, 16), convolution(1, 16, 32)],
        "logits": dflow.variables({"kernel": normal(2, (4 * 4 * 32, 10)), "bias": jnp.zeros(10)}, prefix="logits/"),
    }


def normalized(x, layer, is_training):
    """Return f32[n,h,w,channels] with mean 0 and variance 1 for each channel: of the batch, or by moving statistics."""
    mean, variance = layer["mean"].read(), layer["variance"].read()
    if is_training:
        now = x.mean((0, 1, 2)), x.var((0, 1, 2))
        layer["mean"].assign(mean + MOMENTUM * (now[0] - mean))
        layer["variance"].assign(variance + MOMENTUM * (now[1] - variance))
        mean, variance = now
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["offset"]


def predict(model, images, *, is_training=False):
    """Return the logits f32[n,10] of images f32[n,8,8,1]."""
    x = images
    for layer, stride in zip(model["convolutions"], (1, 2), strict=True):
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"].read(), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(normalized(x, layer, is_training))
    return x.reshape(len(x), -1) @ model["logits"]["kernel"] + model["logits"]["bias"]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=300, help="training steps")
    options.add_argument("--batch", type=int, default=64, help="images in a batch of all workers")
    options.add_argument("--save", metavar="DIR", help="a new folder for the trained variables")
    given = options.parse_args()

    cluster = dflow.connect(collectives=True)
    strategy = dflow.distributed.AllReduce(cluster)
    with strategy.variables():
        model = make_model()
        optimizer = dflow.Optimizer(optax.sgd(0.1, momentum=0.9), dflow.trainable_variables(model), name="momentum")

    @dflow.jit
    def train_step(images, labels):
        def loss():
            logits = predict(model, images, is_training=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = dflow.value_and_grad(loss, dflow.trainable_variables(model))()
        optimizer.apply(gradients)
        return {"loss": value}

    def test(images, labels):
        logits = predict(model, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": losses, "accuracy": logits.argmax(-1) == labels}

    training, held_out = read_digits()
    data = dflow.data.batches(training, given.batch, shuffle=True, epochs=None, drop_remainder=True)
    _, parts = strategy.part

    def batch(number):
        step, part = divmod(number, parts)
        return tuple(np.split(array, parts)[part] for array in data[step])

    run = strategy.run(train_step, batch, steps=given.steps)
    for number, metrics in enumerate(run, 1):
        if number % 100 == 0:
            print(f"{number:5d} steps, loss {metrics['loss']:.4f}", flush=True)

    found = dflow.evaluate(test, dflow.data.batches(held_out, 100))
    print(f"test accuracy {found['accuracy']:.4f} on {found['examples']:.0f} held-out images", flush=True)
    if given.save:
        dflow.save(given.save, model)  # all workers together
    cluster.close()


if __name__ == "__main__":
    main()
