"""What does a call cost, by the number of variables?

One Adam update of N variables of four numbers each, so that nothing but the call is measured: by `dflow.jit`; by
`jax.jit` with the state as a donated pytree; by `jax.jit` with the state as a flat list of donated buffers, which is
the least that any of them can cost. And a function of two arrays without state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish, seconds_per_call

SIZES = (1, 10, 100, 1000)
WORK = 2000


def main() -> None:
    given = options(__doc__, rounds=9)
    rows = [row("no state", stateless(), given.rounds, WORK)]
    for size in SIZES:
        rows.append(row(f"{size} variables", updates(size), given.rounds, max(10, WORK // size)))
    publish("call_cost", rows, as_json=given.json)


def row(name: str, ways: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, Any]:
    for fn in ways.values():
        seconds_per_call(fn, calls)
    found = in_turn({way: lambda fn=fn: seconds_per_call(fn, calls) for way, fn in ways.items()}, rounds)
    flat, low, high = median_ratio(found["dflow"], found["flat"])
    return {
        "step": name,
        "dflow us": sorted(found["dflow"])[rounds // 2] * 1e6,
        "pytree us": sorted(found["pytree"])[rounds // 2] * 1e6,
        "flat us": sorted(found["flat"])[rounds // 2] * 1e6,
        "dflow / flat": flat,
        "p10": low,
        "p90": high,
        "dflow / pytree": median_ratio(found["dflow"], found["pytree"])[0],
    }


def stateless() -> dict[str, Callable[[], Any]]:
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y + 1

    by_dflow, by_jax = dflow.jit(fn), jax.jit(fn)
    x, y = jnp.ones(4), jnp.ones(4)
    return {"dflow": lambda: by_dflow(x, y), "pytree": lambda: by_jax(x, y), "flat": lambda: by_jax(x, y)}


def updates(size: int) -> dict[str, Callable[[], Any]]:
    adam = optax.adam(1e-3)
    values = {f"v{number}": jnp.ones(4) for number in range(size)}
    x = jnp.ones(4)

    def pure(values: Any, state: Any, x: jax.Array) -> Any:
        changes, state = adam.update(dict.fromkeys(values, x), state, values)
        return optax.apply_updates(values, changes), state

    return {
        "dflow": by_dflow(adam, values, x),
        "pytree": by_pytree(adam, values, x, pure),
        "flat": by_flat(adam, values, x, pure),
    }


def by_dflow(adam: Any, values: dict[str, jax.Array], x: jax.Array) -> Callable[[], Any]:
    variables = {name: dflow.Variable(value, name=name) for name, value in values.items()}
    optimizer = dflow.Optimizer(adam, variables)
    step = dflow.jit(lambda x: optimizer.apply(dict.fromkeys(variables, x)))
    return lambda: step(x)


def by_pytree(adam: Any, values: Any, x: jax.Array, pure: Any) -> Callable[[], Any]:
    step = jax.jit(pure, donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, values), adam.init(values)]

    def call() -> None:
        held[0], held[1] = step(held[0], held[1], x)

    return call


def by_flat(adam: Any, values: Any, x: jax.Array, pure: Any) -> Callable[[], Any]:
    leaves, tree = jax.tree.flatten((values, adam.init(values)))

    def flat(*args: Any) -> list[Any]:
        return jax.tree.leaves(pure(*jax.tree.unflatten(tree, args[:-1]), args[-1]))

    step = jax.jit(flat, donate_argnums=tuple(range(len(leaves))))
    held = [jnp.copy(leaf) for leaf in leaves]

    def call() -> None:
        held[:] = step(*held, x)

    return call


if __name__ == "__main__":
    main()
