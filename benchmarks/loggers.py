"""Measure what a logger costs a training loop that logs two metrics of each step, as a ratio to the loop without one.

A step multiplies square matrices, and the loop waits for no result. A logger waits for the results and writes them in
its own thread, which takes processor time beside the loop.
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

WIDTHS = (256, 1024)


def main() -> None:
    given = options(__doc__, rounds=15, steps=200)
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
            ratio, low, high = median_ratio(found[name], found["none"])
            figures = {"without us": 1e6 * median(found["none"]), "with us": 1e6 * median(found[name])}
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


def loop(step: Callable[[Any], Any], x: Any, steps: int, logger: Any) -> float:
    """Return the time of a step of a training loop, in s."""
    metrics: Any = None
    started = time.perf_counter()
    for number in range(steps):
        metrics = step(x)
        if logger is not None:
            logger.log(number, metrics)
    jax.block_until_ready(metrics)
    taken_s = time.perf_counter() - started
    if logger is not None:
        logger.flush()
    return taken_s / steps


if __name__ == "__main__":
    main()
