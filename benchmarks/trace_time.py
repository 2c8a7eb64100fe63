"""Measure the time from the call to the first result, by `dflow.jit` and by `jax.jit`.

A new function each time, so that nothing is cached: a training step of a transformer of 24 layers (forward, backward,
SGD), with its parameters as variables and as a pytree; and a chain of 1,000 ops, without state and with a counter.
XLA's part dominates and is the same for both; dflow adds the graph and its passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 24, 32, 4, 16, 2


def main() -> None:
    given = options(__doc__, rounds=5, short=25)
    functions = (
        ("transformer, 24 layers", transformer(), given.rounds),
        ("chain, 1,000 ops", chain(), given.short),
        ("chain and a counter", counted_chain(), given.short),
    )
    rows = []
    for name, ways, rounds in functions:
        in_turn(ways, 1)  # compiles the code that JAX needs once per process
        found = in_turn(ways, rounds)
        middle, low, high = median_ratio(found["dflow.jit"], found["jax.jit"])
        rows.append(
            {
                "function": name,
                "rounds": rounds,
                "jax.jit s": median(found["jax.jit"]),
                "dflow.jit s": median(found["dflow.jit"]),
                "ratio": middle,
                "p10": low,
                "p90": high,
            }
        )
    publish("trace_time", rows, as_json=given.json)


def first_call(make: Callable[[], Callable[[], Any]]) -> Callable[[], float]:
    """Return a function that makes a new function and returns the time of its first call."""

    def measured() -> float:
        jax.clear_caches()
        fn = make()
        started = time.perf_counter()
        jax.block_until_ready(fn())
        return time.perf_counter() - started

    return measured


def parameters() -> list[dict[str, jax.Array]]:
    def matrix(*shape: int) -> jax.Array:
        return jnp.full(shape, 0.01)

    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def loss(layers: Any, x: jax.Array) -> jax.Array:
    for p in layers:
        x = x + attention(p, normal(x))
        x = x + jax.nn.gelu(normal(x) @ p["up"]) @ p["down"]
    return (x**2).mean()


def normal(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = ((x @ p[name]).reshape(BATCH, LENGTH, HEADS, -1) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k) / 3.0)
    return jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(BATCH, LENGTH, WIDTH) @ p["o"]


def transformer() -> dict[str, Callable[[], float]]:
    x = jnp.ones((BATCH, LENGTH, WIDTH))

    def by_jax() -> Callable[[], Any]:
        @jax.jit
        def step(layers: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(layers, x)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads)

        layers = parameters()
        return lambda: step(layers, x)

    def by_dflow() -> Callable[[], Any]:
        layers = dflow.variables(parameters())

        @dflow.jit
        def step(x: jax.Array) -> Any:
            value, grads = dflow.value_and_grad(lambda: loss(dflow.read(layers), x), layers)()
            for p, g in zip(layers, grads, strict=True):
                for name in p:
                    p[name].assign_add(-0.1 * g[name])
            return value

        return lambda: step(x)

    return {"jax.jit": first_call(by_jax), "dflow.jit": first_call(by_dflow)}


def links(x: jax.Array) -> jax.Array:
    for number in range(500):
        x = jnp.sin(x) * (1 + number)
    return x


def counted_chain() -> dict[str, Callable[[], float]]:
    x = jnp.ones(8)

    def by_jax() -> Callable[[], Any]:
        count = jnp.float32(0)
        step = jax.jit(lambda count, x: (count + 1, links(x) + count), donate_argnums=0)
        return lambda: step(count, x)

    def by_dflow() -> Callable[[], Any]:
        count = dflow.Variable(jnp.float32(0))

        @dflow.jit
        def step(x: jax.Array) -> jax.Array:
            before = count.read()
            count.assign_add(1.0)
            return links(x) + before

        return lambda: step(x)

    return {"jax.jit": first_call(by_jax), "dflow.jit": first_call(by_dflow)}


def chain() -> dict[str, Callable[[], float]]:
    x = jnp.ones(8)

    def made(jit: Any) -> Callable[[], Any]:
        jitted = jit(links)
        return lambda: jitted(x)

    return {"jax.jit": first_call(lambda: made(jax.jit)), "dflow.jit": first_call(lambda: made(dflow.jit))}


if __name__ == "__main__":
    main()
