"""Measure a training step partitioned over two devices by scopes, beside JAX partitioned by hand.

By default, the two devices are made by XLA of this machine's CPU; `JAX_PLATFORMS=cuda,cpu` chooses two GPUs. The models
are a network with one half on the first device and the other on the second, and a table of rows on the second below a
tower on the first; both are trained by gradient descent:

- dflow: one function, `dflow.device` around each part;
- by hand: for each part and direction a separate `jax.jit` with its parameters donated, `jax.device_put` in between,
  the residuals kept on their device by `jax.vjp`;
- sharded: one `jax.jit` over a mesh of both, the weights, or the rows of the table, sharded over it by `NamedSharding`;
  each step is waited for, since collectives between devices of one CPU can deadlock when steps overlap;
- one device: one `jax.jit` on the first, with all parameters as a donated pytree.

All have the same parameters and batches, and their losses are compared before the timing. A time is the mean of many
consecutive steps without waits between them; all alternatives run in each round, in random order. Two devices on the
same cores give no speedup: the benchmark measures the cost of the partitioning.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish

RATE = 0.01
#: Approximate duration of the consecutive steps of one measurement, in s.
ROW_S = 0.15

Step = Callable[[], jax.Array]
#: By parameter.
Values = dict[str, Any]


def main() -> None:
    given = options(__doc__, rounds=15)
    publish(
        "devices",
        [row for name, ways in MODELS.items() for row in rows_of(name, ways(), given.rounds)],
        as_json=given.json,
    )


def devices() -> tuple[jax.Device, jax.Device]:
    """The two devices, of the platform that JAX chooses."""
    one, other, *_ = jax.local_devices()
    return one, other


def on(index: int) -> AbstractContextManager[None]:
    """The scope of one of the two devices."""
    return dflow.device(f"{devices()[index].platform}:{index}")


def mesh() -> Mesh:
    return jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=devices())


def descended(values: Values, gradients: Values) -> Values:
    return {name: value - RATE * gradients[name] for name, value in values.items()}


# Two halves of layers.


def half(values: Values, x: Any) -> Any:
    for value in values.values():
        x = jnp.tanh(x @ value)
    return x


def halves(batch: int, width: int, layers: int) -> dict[str, Step]:
    draws = np.random.default_rng(0)
    first, second = (
        {f"{part}{number}": draws.normal(0, width**-0.5, (width, width)).astype(np.float32) for number in range(layers)}
        for part in ("first", "second")
    )
    x = draws.normal(size=(batch, width)).astype(np.float32)
    y = np.tanh(draws.normal(size=(batch, width))).astype(np.float32)

    def loss(h: Any, y: Any) -> Any:
        return jnp.mean((h - y) ** 2)

    def whole(values: tuple[Values, Values], x: Any, y: Any) -> Any:
        return loss(half(values[1], half(values[0], x)), y)

    spread = NamedSharding(mesh(), PartitionSpec(None, "d"))
    return {
        "dflow": halves_by_scopes(first, second, x, y, loss),
        "by hand": halves_by_hand(first, second, x, y, loss),
        "sharded": in_one(whole, (first, second), (x, y), jax.tree.map(lambda _: spread, (first, second))),
        "one device": in_one(whole, (first, second), (x, y)),
    }


def halves_by_scopes(first: Values, second: Values, x: Any, y: Any, loss: Any) -> Step:
    with on(0):
        lower = dflow.variables(first)
    with on(1):
        upper = dflow.variables(second)
    held = [*lower.values(), *upper.values()]

    @dflow.jit
    def step(x: Any, y: Any) -> Any:
        def of_variables() -> Any:
            with on(0):
                h = half(lower, x)
            with on(1):
                return loss(half(upper, h), y)

        value, gradients = dflow.value_and_grad(of_variables, held)()
        for variable, gradient in zip(held, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        return value

    one, other = devices()
    given = jax.device_put(x, one), jax.device_put(y, other)
    return lambda: step(*given)


def halves_by_hand(first: Values, second: Values, x: Any, y: Any, loss: Any) -> Step:
    one, other = devices()

    @jax.jit
    def forward(lower: Values, x: Any) -> Any:
        return jax.vjp(lambda values: half(values, x), lower)

    @partial(jax.jit, donate_argnums=0)
    def middle(upper: Values, h: Any, y: Any) -> Any:
        value, (gradients, for_h) = jax.value_and_grad(lambda values, h: loss(half(values, h), y), (0, 1))(upper, h)
        return descended(upper, gradients), value, for_h

    @partial(jax.jit, donate_argnums=0)
    def backward(lower: Values, pull: Any, for_h: Any) -> Any:
        (gradients,) = pull(for_h)
        return descended(lower, gradients)

    held = [jax.device_put(first, one), jax.device_put(second, other)]
    given = jax.device_put(x, one), jax.device_put(y, other)

    def step() -> jax.Array:
        h, pull = forward(held[0], given[0])
        held[1], value, for_h = middle(held[1], jax.device_put(h, other), given[1])
        held[0] = backward(held[0], pull, jax.device_put(for_h, one))
        return value  # type: ignore[no-any-return]

    return step


def in_one(whole: Callable[..., Any], values: Any, given: Any, places: Any = None) -> Step:
    """Return the step as one `jax.jit`: on one device, or with the values at `places` and the rest on the mesh."""
    one, _ = devices()

    @partial(jax.jit, donate_argnums=0)
    def update(values: Any, *given: Any) -> Any:
        value, gradients = jax.value_and_grad(whole)(values, *given)
        return jax.tree.map(lambda old, gradient: old - RATE * gradient, values, gradients), value

    everywhere = one if places is None else NamedSharding(mesh(), PartitionSpec())
    held = [jax.device_put(values, one if places is None else places)]
    here = jax.device_put(given, everywhere)

    def step() -> jax.Array:
        held[0], value = update(held[0], *here)
        if places is not None:
            jax.block_until_ready(held)
        return value  # type: ignore[no-any-return]

    return step


# A table below a tower.


def tower(values: Values, rows: Any, y: Any) -> Any:
    x = rows.reshape(len(rows), -1)
    x = jnp.tanh(x @ values["in"])
    x = jnp.tanh(x @ values["hidden"])
    return jnp.mean((x @ values["out"] - y) ** 2)


def embedding(count: int, width: int, batch: int, each: int, hidden: int) -> dict[str, Step]:
    draws = np.random.default_rng(0)
    table = draws.normal(size=(count, width)).astype(np.float32)
    sizes = {"in": (each * width, hidden), "hidden": (hidden, hidden), "out": (hidden, 1)}
    values = {name: draws.normal(0, size[0] ** -0.5, size).astype(np.float32) for name, size in sizes.items()}
    ids = draws.integers(0, count, (batch, each)).astype(np.int32)
    y = draws.normal(size=(batch, 1)).astype(np.float32)
    return {
        "dflow": embedding_by_scopes(table, values, ids, y),
        "by hand": embedding_by_hand(table, values, ids, y),
        "sharded": embedding_in_one(table, values, ids, y, is_spread=True),
        "one device": embedding_in_one(table, values, ids, y, is_spread=False),
    }


def embedding_by_scopes(table: Any, values: Values, ids: Any, y: Any) -> Step:
    with on(1):
        words = dflow.Variable(table, name="words")
    with on(0):
        held = dflow.variables(values)

    @dflow.jit
    def step(ids: Any, y: Any) -> Any:
        with on(1):
            looked_up = words[ids]
        with on(0):

            def of_rows(rows: Any) -> Any:
                return tower(dflow.read(held), rows, y)

            value, (gradients, for_rows) = dflow.value_and_grad(of_rows, held, argnums=0)(looked_up)
        for name, variable in held.items():
            variable.assign_sub(RATE * gradients[name])
        with on(1):
            words.scatter_add(ids, -RATE * for_rows)
        return value

    one, other = devices()
    given = jax.device_put(ids, other), jax.device_put(y, one)
    return lambda: step(*given)


def embedding_by_hand(table: Any, values: Values, ids: Any, y: Any) -> Step:
    one, other = devices()

    @jax.jit
    def look_up(words: Any, ids: Any) -> Any:
        return words[ids]

    @partial(jax.jit, donate_argnums=0)
    def middle(values: Values, rows: Any, y: Any) -> Any:
        value, (gradients, for_rows) = jax.value_and_grad(tower, (0, 1))(values, rows, y)
        return descended(values, gradients), value, for_rows

    @partial(jax.jit, donate_argnums=0)
    def update(words: Any, ids: Any, for_rows: Any) -> Any:
        return words.at[ids].add(-RATE * for_rows)

    words, held = [jax.device_put(table, other)], [jax.device_put(values, one)]
    given = jax.device_put(ids, other), jax.device_put(y, one)

    def step() -> jax.Array:
        rows = jax.device_put(look_up(words[0], given[0]), one)
        held[0], value, for_rows = middle(held[0], rows, given[1])
        words[0] = update(words[0], given[0], jax.device_put(for_rows, other))
        return value  # type: ignore[no-any-return]

    return step


def embedding_in_one(table: Any, values: Values, ids: Any, y: Any, *, is_spread: bool) -> Step:
    one, _ = devices()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(words: Any, values: Values, ids: Any, y: Any) -> Any:
        value, (gradients, for_rows) = jax.value_and_grad(tower, (0, 1))(values, words[ids], y)
        return words.at[ids].add(-RATE * for_rows), descended(values, gradients), value

    rows, everywhere = (NamedSharding(mesh(), PartitionSpec(*axes)) for axes in (("d",), ()))
    held = [jax.device_put(table, rows if is_spread else one), jax.device_put(values, everywhere if is_spread else one)]
    given = jax.device_put((ids, y), everywhere if is_spread else one)

    def step() -> jax.Array:
        held[0], held[1], value = update(*held, *given)
        if is_spread:
            jax.block_until_ready(held)
        return value  # type: ignore[no-any-return]

    return step


MODELS: dict[str, Callable[[], dict[str, Step]]] = {
    "two halves of 2 layers, 256 wide": lambda: halves(64, 256, 2),
    "two halves of 4 layers, 1024 wide": lambda: halves(256, 1024, 4),
    "table of 20,000 x 32, tower 64 wide": lambda: embedding(20_000, 32, 64, 4, 64),
    "table of 200,000 x 64, tower 512 wide": lambda: embedding(200_000, 64, 1024, 8, 512),
}


# Measuring.


def rows_of(name: str, ways: Mapping[str, Step], rounds: int) -> list[dict[str, Any]]:
    """Return the median step time of each alternative, and its ratio to JAX by hand, round by round."""
    refuse_other_losses(name, {way: [float(step()) for _ in range(3)] for way, step in ways.items()})
    count = max(2, int(ROW_S / max(in_a_row(step, 2)[0] for step in ways.values())))
    times = in_turn({way: partial(in_a_row, step, count) for way, step in ways.items()}, rounds)
    wall = {way: [seconds for seconds, _ in found] for way, found in times.items()}
    busy = {way: [of_processor for _, of_processor in found] for way, found in times.items()}
    rows = []
    for way in ways:
        ratio, low, high = median_ratio(wall[way], wall["by hand"])
        rows.append(
            {
                "step": name,
                "way": way,
                "ms": statistics.median(wall[way]) * 1e3,
                "/ by hand": ratio,
                "p10": low,
                "p90": high,
                "processor ms": statistics.median(busy[way]) * 1e3,
                "processor / by hand": median_ratio(busy[way], busy["by hand"])[0],
            }
        )
    return rows


def in_a_row(step: Step, count: int) -> tuple[float, float]:
    """Return the wall time and the processor time of a step, in s, over `count` steps; only the last is waited for."""
    started, of_processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        value = step()
    jax.block_until_ready(value)
    return (time.perf_counter() - started) / count, (time.process_time() - of_processor) / count


def refuse_other_losses(name: str, losses: Mapping[str, list[float]]) -> None:
    """Exit with an error if the losses of the first steps differ between alternatives."""
    for way, found in losses.items():
        if not np.allclose(found, losses["one device"], rtol=1e-3):
            raise SystemExit(f"{name}: the losses are {losses['one device']} on one device and {found} {way}")
        if found[0] == found[-1]:
            raise SystemExit(f"{name}: {way} trains nothing, the losses are {found}")


if __name__ == "__main__":
    main()
