"""Measure the cost of a call by the number of variables.

One Adam update of N variables of four numbers each, so that the call dominates: by `dflow.jit`; by `jax.jit` with the
state as a donated pytree; by `jax.jit` with the state as a flat list of donated buffers, which is the least that
`jax.jit` can cost; by `nnx.jit`; by `jax.jit` over references (`jax.Ref`). Also a function of two arrays without state,
and the longest of many consecutive calls.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish

SIZES = (1, 10, 100, 1000)
#: Calls per round times the number of variables.
WORK = 2000
#: The longest call of a long run should be shorter.
LONGEST_MS = 20.0

Call = Callable[[], Any]


def main() -> None:
    given = options(__doc__, rounds=9, calls=100_000)
    rows = [row("no state", stateless(), given.rounds, WORK)]
    for size in SIZES:
        rows.append(row(f"{size} variables", updates(size), given.rounds, max(20, WORK // size)))
    publish("call_cost", rows, as_json=given.json)
    if given.calls < 1:
        return
    tails = [tail("no state", stateless(), given.calls), tail("10 variables", updates(10, slow=False), given.calls)]
    publish("call_tail", tails, as_json=given.json)


def row(name: str, ways: dict[str, Call], rounds: int, calls: int) -> dict[str, Any]:
    for fn in ways.values():
        times(fn, 50)
    found = in_turn({way: lambda fn=fn: times(fn, calls) for way, fn in ways.items()}, rounds)
    medians = {way: [statistics.median(each) for each in lists] for way, lists in found.items()}
    flat, low, high = median_ratio(medians["dflow"], medians["flat"])
    figures: dict[str, Any] = {"step": name}
    for way in ("dflow", "flat", "pytree", "nnx", "ref"):
        figures[f"{way} us"] = statistics.median(medians[way]) * 1e6 if way in ways else "-"
    pooled = sorted(call for each in found["dflow"] for call in each)
    figures |= {"dflow p99 us": pooled[len(pooled) * 99 // 100] * 1e6}
    figures |= {"dflow / flat": flat, "p10": low, "p90": high}
    for way in ("pytree", "nnx", "ref"):
        figures[f"/ {way}"] = median_ratio(medians["dflow"], medians[way])[0] if way in ways else "-"
    return figures


def tail(name: str, ways: dict[str, Call], calls: int) -> dict[str, Any]:
    """Return the longest of `calls` calls of dflow and of the flat list, in alternating blocks of 1,000."""
    longest: dict[str, list[float]] = {"dflow": [], "flat": []}
    for way in longest:
        times(ways[way], 50)
    gc.collect()
    for done in range(0, calls, 1000):
        for way, found in longest.items():
            found += sorted(times(ways[way], min(1000, calls - done)))[-10:]
    figures: dict[str, Any] = {"step": name, "calls": calls}
    for way, found in longest.items():
        figures[f"{way} longest ms"] = max(found) * 1e3
        figures[f"{way} over {LONGEST_MS:g} ms"] = sum(call * 1e3 > LONGEST_MS for call in found)
    return figures


def times(fn: Call, calls: int) -> list[float]:
    """Return the time of each of `calls` calls, in s."""
    clock, found = time.perf_counter, []
    for _ in range(calls):
        started = clock()
        fn()
        found.append(clock() - started)
    return found


def stateless() -> dict[str, Call]:
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y + 1

    by_dflow, by_jax = dflow.jit(fn), jax.jit(fn)
    x, y = jnp.ones(4), jnp.ones(4)
    return {"dflow": lambda: by_dflow(x, y), "flat": lambda: by_jax(x, y)}


def updates(size: int, *, slow: bool = True) -> dict[str, Call]:
    adam = optax.adam(1e-3)
    values = {f"v{number}": jnp.ones(4) for number in range(size)}
    x = jnp.ones(4)

    def pure(values: Any, state: Any, x: jax.Array) -> Any:
        changes, state = adam.update(dict.fromkeys(values, x), state, values)
        return optax.apply_updates(values, changes), state

    ways = {
        "dflow": by_dflow(adam, values, x),
        "pytree": by_pytree(adam, values, x, pure),
        "flat": by_flat(adam, values, x, pure),
    }
    return ways | ({"nnx": by_nnx(adam, values, x), "ref": by_refs(adam, values, x, pure)} if slow else {})


def by_dflow(adam: Any, values: dict[str, jax.Array], x: jax.Array) -> Call:
    variables = {name: dflow.Variable(value, name=name) for name, value in values.items()}
    optimizer = dflow.Optimizer(adam, variables)
    step = dflow.jit(lambda x: optimizer.apply(dict.fromkeys(variables, x)))
    return lambda: step(x)


def by_pytree(adam: Any, values: Any, x: jax.Array, pure: Any) -> Call:
    step = jax.jit(pure, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, values), adam.init(values)]

    def call() -> None:
        held[0], held[1] = step(held[0], held[1], x)

    return call


def by_flat(adam: Any, values: Any, x: jax.Array, pure: Any) -> Call:
    leaves, tree = jax.tree.flatten((values, adam.init(values)))

    def flat(*args: Any) -> list[Any]:
        return jax.tree.leaves(pure(*jax.tree.unflatten(tree, args[:-1]), args[-1]))

    step = jax.jit(flat, donate_argnums=tuple(range(len(leaves))))
    held = [jnp.copy(leaf) for leaf in leaves]

    def call() -> None:
        held[:] = step(*held, x)

    return call


def by_nnx(adam: Any, values: Any, x: jax.Array) -> Call:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.values = nnx.Dict({name: nnx.Param(jnp.copy(value)) for name, value in values.items()})

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer[Model], x: jax.Array) -> None:
        optimizer.update(model, jax.tree.map(lambda _: x, nnx.state(model, nnx.Param)))

    model = Model()
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    return lambda: step(model, optimizer, x)


def by_refs(adam: Any, values: Any, x: jax.Array, pure: Any) -> Call:
    leaves, tree = jax.tree.flatten((values, adam.init(values)))
    refs = [jax.new_ref(jnp.copy(leaf)) for leaf in leaves]

    @jax.jit
    def step(refs: list[Any], x: jax.Array) -> None:
        after = pure(*jax.tree.unflatten(tree, [ref[...] for ref in refs]), x)
        for ref, value in zip(refs, jax.tree.leaves(after), strict=True):
            ref[...] = value

    return lambda: step(refs, x)


if __name__ == "__main__":
    main()
