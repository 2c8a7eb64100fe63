"""Measure what a logger costs a training loop that logs two metrics of each step, as a ratio to the loop without one.

A step multiplies square matrices, and the loop waits for no result. A logger waits for the results and writes them in
its own thread, which takes processor time beside the loop. *own us* is the processor time that the loop's thread takes
for `log`, which other programs of the machine change little.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish
from dflow.loggers import CSV, TensorBoard

WIDTHS = (128, 512)


def main() -> None:
    given = options(__doc__, rounds=15, steps=100)
    rows = []
    for width in WIDTHS:
        step, x = model(width)
        with (
            tempfile.TemporaryDirectory() as folder,
            CSV(Path(folder) / "log.csv") as csv,
            TensorBoard(folder) as board,
        ):
            loggers: dict[str, Any] = {"none": None, "CSV": csv, "TensorBoard": board}
            ways = {name: partial(loop, step, x, given.steps, logger) for name, logger in loggers.items()}
            in_turn(ways, 1)
            found = in_turn(ways, given.rounds)
        for name in ("CSV", "TensorBoard"):
            walls = {way: [wall_s for wall_s, _ in pairs] for way, pairs in found.items()}
            ratio, low, high = median_ratio(walls[name], walls["none"])
            figures = {"without us": 1e6 * median(walls["none"]), "with us": 1e6 * median(walls[name])}
            owns = zip(found[name], found["none"], strict=True)
            figures["own us"] = 1e6 * median(own_s - base_s for (_, own_s), (_, base_s) in owns)
            rows.append({"width": width, "logger": name, **figures, "ratio": ratio, "p10": low, "p90": high})
    publish("loggers", rows, as_json=given.json)


def model(width: int) -> tuple[Callable[[Any], Any], Any]:
    """Return a step that changes a variable, and its argument."""
    w = dflow.Variable(lambda: jnp.eye(width), name=f"w{width}")

    @dflow.jit
    def step(x: Any) -> Any:
        y = x @ w
        w.assign_sub(1e-9 * y)
        return {"loss": jnp.sum(y), "largest": jnp.max(y)}

    return step, jnp.ones((width, width))


def loop(step: Callable[[Any], Any], x: Any, steps: int, logger: Any) -> tuple[float, float]:
    """Return the time of a step of a training loop, and the processor time of its thread, in s."""
    metrics: Any = None
    started, own = time.perf_counter(), time.thread_time()
    for number in range(steps):
        metrics = step(x)
        if logger is not None:
            logger.log(number, metrics)
    own_s = time.thread_time() - own
    jax.block_until_ready(metrics)
    wall_s = time.perf_counter() - started
    if logger is not None:
        logger.flush()
    return wall_s / steps, own_s / steps


if __name__ == "__main__":
    main()
