"""Does XLA gain from one packed buffer in place of many small arrays?

The functions are those of a step on a cluster: *worker* computes the gradients of N layers of 64 x 64 from parameters
that arrived in one buffer of the host; *update* is Adam of N variables on a parameter task, from gradients that arrived
so, and returns the new parameters to the host. *arrays* passes a NumPy view of each array and takes each result; in
*packed* the program cuts one array and joins its results. `compile` is the time of tracing and compilation, in s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._paired import in_turn, median_ratio, options, publish

SIZES = (50, 200)
SHAPE = (64, 64)
BATCH = 32
CALLS = 5


def main() -> None:
    given = options(__doc__, rounds=15)
    publish("packing", [row(kind, size, given.rounds) for kind in KINDS for size in SIZES], as_json=given.json)


def row(kind: str, size: int, rounds: int) -> dict[str, Any]:
    buffer = np.random.default_rng(0).standard_normal(size * SHAPE[0] * SHAPE[1], np.float32) * 0.1
    ways: dict[str, Callable[[], None]] = {}
    compile_s = {}
    for way in ("arrays", "packed"):
        started = time.perf_counter()
        ways[way] = KINDS[kind](buffer, is_packed=way == "packed")
        compile_s[way] = time.perf_counter() - started
        ways[way]()
    found = in_turn({way: partial(milliseconds, call) for way, call in ways.items()}, rounds)
    ratio, low, high = median_ratio(found["packed"], found["arrays"])
    return {
        "program": kind,
        "arrays": size,
        **{f"{way} ms": median(times) for way, times in found.items()},
        "packed / arrays": ratio,
        "p10": low,
        "p90": high,
        **{f"compile {way}": seconds for way, seconds in compile_s.items()},
    }


def milliseconds(call: Callable[[], None]) -> float:
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def worker(buffer: Any, *, is_packed: bool) -> Callable[[], None]:
    """Return a call that computes the gradients, from the parameters in `buffer`."""
    x = jnp.ones((BATCH, SHAPE[0]))

    def gradients(parameters: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for weight in weights:
                h = jnp.tanh(h @ weight)
            return (h**2).mean()

        return returned(jax.grad(loss)(taken(parameters)), is_packed)

    compiled = jax.jit(gradients).lower(given_as(buffer, is_packed), x).compile()
    return lambda: to_host(compiled(given_as(buffer, is_packed), x))


def update(buffer: Any, *, is_packed: bool) -> Callable[[], None]:
    """Return a call that updates parameters and slots, by the gradients in `buffer`."""

    def adam(state: Any, gradients: Any) -> Any:
        new = []
        for (w, m, v), g in zip(state, taken(gradients), strict=True):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            new.append((w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v))
        return new, returned([w for w, _, _ in new], is_packed) if is_packed else []

    held = [[(jnp.array(g), jnp.zeros(SHAPE), jnp.zeros(SHAPE)) for g in given_as(buffer, False)]]
    compiled = jax.jit(adam, donate_argnums=0).lower(held[0], given_as(buffer, is_packed)).compile()

    def call() -> None:
        held[0], packed = compiled(held[0], given_as(buffer, is_packed))
        to_host(packed if is_packed else [w for w, _, _ in held[0]])

    return call


KINDS: dict[str, Callable[..., Callable[[], None]]] = {"worker": worker, "update": update}


def given_as(buffer: Any, is_packed: bool) -> Any:
    return buffer if is_packed else list(buffer.reshape(-1, *SHAPE))


def taken(values: Any) -> Any:
    """Return the arrays of an argument, inside a program."""
    if isinstance(values, list):
        return values
    size = SHAPE[0] * SHAPE[1]
    return [values[start : start + size].reshape(SHAPE) for start in range(0, values.size, size)]


def returned(arrays: Any, is_packed: bool) -> Any:
    """Return the results of a program: joined if it is packed."""
    return jnp.concatenate([array.reshape(-1) for array in arrays]) if is_packed else arrays


def to_host(results: Any) -> None:
    for array in jax.tree.leaves(results):
        np.asarray(array)


if __name__ == "__main__":
    main()
