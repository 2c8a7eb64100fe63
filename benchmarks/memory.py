"""Measure the memory of a training step.

A step of Adam on a chain of dense layers, 134 MB of parameters, by `dflow.jit` and by `jax.jit` with the state donated
by hand: XLA's analysis of the program, and the process's peak beyond its memory before. Each runs in a separate
process, in alternation, whose allocator returns freed memory immediately: otherwise the figure would include memory it
keeps.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._launched import last_line_of
from benchmarks._paired import in_turn, median_ratio, options, publish

LAYERS, WIDTH, BATCH, STEPS = 8, 2048, 64, 5
DEADLINE_S = 300.0
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2])
        return
    given = options(__doc__, rounds=5)
    found = in_turn({way: lambda way=way: in_a_process(way) for way in WAYS}, given.rounds)
    rows = []
    for figure in ("program", "resident"):
        sizes = {way: [one[figure] for one in found[way]] for way in WAYS}
        ratio, low, high = median_ratio(sizes["dflow"], sizes["jax"])
        medians = {f"{way} MB": sorted(sizes[way])[given.rounds // 2] for way in WAYS}
        rows.append({"peak of": figure, **medians, "ratio": ratio, "p10": low, "p90": high})
    publish("memory", rows, as_json=given.json)


def in_a_process(way: str) -> dict[str, float]:
    figures: dict[str, float] = json.loads(last_line_of("memory", ("--run", way), timeout_s=DEADLINE_S, **ALLOCATOR))
    return figures


def run(way: str) -> None:
    """Print the figures of one alternative, in MB."""
    import jax
    import jax.numpy as jnp
    import optax

    import dflow

    x = jnp.ones((BATCH, WIDTH))
    dflow.jit(optax.tree.sum)(x)
    jax.jit(lambda x: x @ jnp.ones((WIDTH, 8)))(x).block_until_ready()  # allocates the memory of JAX itself
    before = peak_mb()
    step, analysis = WAYS[way](x)
    for _ in range(STEPS):
        jax.block_until_ready(step())
    print(json.dumps({"program": program_mb(analysis), "resident": peak_mb() - before}))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def program_mb(analysis: Any) -> float:
    """Return the memory of a program in use at the same time: arguments, results not aliased to them, and scratch."""
    own = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return float((analysis.argument_size_in_bytes + own + analysis.temp_size_in_bytes) / 1e6)


def loss_of(weights: Any, x: Any) -> Any:
    import jax.numpy as jnp

    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def initial(number: int) -> Any:
    import jax

    return jax.random.normal(jax.random.key(number), (WIDTH, WIDTH)) / WIDTH**0.5


def by_dflow(x: Any) -> tuple[Callable[[], Any], Any]:
    import optax

    import dflow

    weights = [dflow.Variable(lambda number=number: initial(number), name=f"w{number}") for number in range(LAYERS)]
    optimizer = dflow.Optimizer(optax.adam(1e-3), weights)

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss_of(weights, x), weights)()
        optimizer.apply(gradients)
        return value

    return lambda: step(x), step.lower(x).compile().memory_analysis()


def by_jax(x: Any) -> tuple[Callable[[], Any], Any]:
    import jax
    import optax

    adam = optax.adam(1e-3)
    weights = [initial(number) for number in range(LAYERS)]
    held = [weights, adam.init(weights)]
    del weights

    def fn(weights: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(weights, x)
        changes, state = adam.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, value

    step = jax.jit(fn, donate_argnums=(0, 1))

    def call() -> Any:
        held[0], held[1], value = step(held[0], held[1], x)
        return value

    return call, step.lower(held[0], held[1], x).compile().memory_analysis()


WAYS: dict[str, Callable[[Any], tuple[Callable[[], Any], Any]]] = {"dflow": by_dflow, "jax": by_jax}

if __name__ == "__main__":
    main()
