"""The worker of `benchmarks.language_model`: trains an LSTM language model, and prints times and bytes as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow
from benchmarks._embedding_dflow import timed

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--softmax", choices=("full", "sampled"), required=True)
    for name in ("words", "width", "batch", "length", "samples", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    step = make_step(cluster, given)
    draw = np.random.default_rng(0)
    for number in range(WARM_UP):
        timed(step, (text(draw, given), jax.random.key(number)))
    before = moved(cluster)
    times = [timed(step, (text(draw, given), jax.random.key(number))) for number in range(given.steps)]
    print("measured " + json.dumps({"times": times, "moved": (moved(cluster) - before) / given.steps}), flush=True)
    cluster.close()


def moved(cluster: Any) -> int:
    """Bytes of values that this worker has sent and received."""
    received: int = sum(cluster.server.channel.taken_in().values())
    return received + sum(edge.size_bytes for edge in cluster.traffic())


def text(draw: np.random.Generator, given: argparse.Namespace) -> Any:
    """Draw word numbers, small ones often, as in text that is numbered by frequency: i32[batch, length + 1]."""
    drawn = np.exp(draw.random((given.batch, given.length + 1)) * np.log(given.words + 1)) - 1
    return drawn.astype(np.int32)


def make_step(cluster: Any, given: argparse.Namespace) -> Any:
    """A training step: embedding, LSTM and softmax, the tables in a shard on each ps task."""
    width, scale = given.width, given.width**-0.5
    with cluster.parameter_servers():
        embedding = dflow.Embedding(given.words, width, by="modulo", name="embedding")
        softmax = dflow.Embedding(given.words, width, by="modulo", name="softmax")
        gates = dflow.Variable(
            lambda: jax.random.normal(jax.random.key(1), (2 * width, 4 * width)) * scale, name="gates"
        )
        tables = [embedding, softmax, gates]
        optimizer = dflow.Optimizer(optax.adagrad(0.1), tables, name="optimizer")

    @dflow.jit
    def step(words: Any, key: Any) -> Any:
        def loss() -> Any:
            inputs = jnp.swapaxes(embedding(words[:, :-1]), 0, 1)
            matrix = gates.read()

            def cell(carry: Any, word: Any) -> Any:
                hidden, memory = carry
                enter, forget, leave, new = jnp.split(jnp.concatenate([word, hidden], -1) @ matrix, 4, -1)
                memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
                hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
                return (hidden, memory), hidden

            start = jnp.zeros((given.batch, width))
            hidden = jnp.swapaxes(jax.lax.scan(cell, (start, start), inputs)[1], 0, 1)
            if given.softmax == "full":
                return dflow.softmax_cross_entropy(softmax, hidden, words[:, 1:]).mean()
            return dflow.sampled_softmax_cross_entropy(
                softmax, hidden, words[:, 1:], samples=given.samples, key=key
            ).mean()

        value, gradients = dflow.value_and_grad(loss, tables)()
        optimizer.apply(gradients)
        return value

    return step


if __name__ == "__main__":
    main()
