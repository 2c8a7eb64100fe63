"""Train a generator of handwritten digits against a critic, in one process or on a cluster.

    python examples/generator.py
    dflow launch --ps 1 --workers 2 examples/generator.py

A generative adversarial pair on scikit-learn's digits: two networks as variables, each with its optimizer, and one
compiled step that updates both. The critic learns to tell real pictures from made ones, the generator to make pictures
that the critic takes for real. The random numbers are state of each worker.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import dflow

PIXELS, NOISE, HIDDEN = 64, 16, 128


def make_network(name, sizes):
    """Return the variables of dense layers of these sizes."""

    def normal(seed, rows, columns):
        return lambda: jax.random.normal(jax.random.key(seed), (rows, columns)) * np.sqrt(2 / rows)

    layers = [
        {"kernel": normal(number, rows, columns), "bias": jnp.zeros(columns)}
        for number, (rows, columns) in enumerate(itertools.pairwise(sizes))
    ]
    return dflow.variables(layers, prefix=f"{name}/")


def run(network, x):
    """Return the last layer's result, with leaky ReLUs between the layers."""
    *first, last = dflow.read(network)
    for layer in first:
        x = jax.nn.leaky_relu(x @ layer["kernel"] + layer["bias"], 0.2)
    return x @ last["kernel"] + last["bias"]


def make_pictures(generator, key, count):
    """Return pictures f32[count,64] in [0, 1]."""
    return jax.nn.sigmoid(run(generator, jax.random.normal(key, (count, NOISE))))


def distance_to(pictures, made):
    """Return the mean distance of made pictures from the nearest of `pictures`."""
    return np.sqrt(((made[:, None] - pictures[None]) ** 2).sum(-1).min(1)).mean()


def as_text(picture):
    """Return a picture of 8 by 8 in eight lines."""
    return "\n".join("".join(" .:+#"[int(4.99 * pixel)] * 2 for pixel in row) for row in picture.reshape(8, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="training steps of all workers together")
    parser.add_argument("--batch", type=int, default=64, help="real pictures in a batch, and made ones")
    options = parser.parse_args()

    real = (load_digits().data / 16).astype(np.float32)
    training, held_out = real[:-300], real[-300:]
    cluster = dflow.connect()
    with cluster.parameter_servers():
        generator = make_network("generator", (NOISE, HIDDEN, HIDDEN, PIXELS))
        critic = make_network("critic", (PIXELS, HIDDEN, HIDDEN, 1))
        generator_optimizer = dflow.Optimizer(optax.adam(1e-3, b1=0.5), generator, name="generator_adam")
        critic_optimizer = dflow.Optimizer(optax.adam(1e-3, b1=0.5), critic, name="critic_adam")
    noise = dflow.Generator(cluster.index, name=f"noise_{cluster.index}")

    @dflow.jit
    def train_step(pictures):
        key = noise.split()

        def critic_loss():
            made = make_pictures(generator, key, len(pictures))
            return (jax.nn.softplus(-run(critic, pictures)) + jax.nn.softplus(run(critic, made))).mean()

        def generator_loss():
            return jax.nn.softplus(-run(critic, make_pictures(generator, key, len(pictures)))).mean()

        critic_value, by_critic = dflow.value_and_grad(critic_loss, critic)()
        generator_value, by_generator = dflow.value_and_grad(generator_loss, generator)()
        critic_optimizer.apply(by_critic)
        generator_optimizer.apply(by_generator)
        return {"critic loss": critic_value, "generator loss": generator_value}

    sample = dflow.jit(lambda: make_pictures(generator, jax.random.key(1), 100))
    before = distance_to(held_out, np.asarray(sample()))
    batches = dflow.data.batches(training, options.batch, shuffle=True, epochs=None, drop_remainder=True)
    strategy = dflow.distributed.Async(cluster)
    for number, metrics in enumerate(strategy.run(train_step, lambda step: batches[step], steps=options.steps), 1):
        if number % 500 == 0:
            print(
                f"{number:5d} steps done here,", *(f"{name} {value:.2f}" for name, value in metrics.items()), flush=True
            )

    if cluster.elect("evaluation"):
        made = np.asarray(sample())
        print(as_text(made[0]))
        print(f"distance from the nearest held-out digit: {before:.2f} at first", end=", ")
        print(
            f"{distance_to(held_out, made):.2f} now, {distance_to(held_out, training):.2f} of real digits", flush=True
        )
    cluster.close()


if __name__ == "__main__":
    main()
