"""The click-through model of `peers_training`, the same in each runtime: sizes, initial values, batches, and the loop.

The file imports no runtime.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

#: Categorical fields and numbers of an example, columns of the table, and widths of the layers.
FIELDS, NUMBERS, COLUMNS, HIDDEN = 26, 13, 16, (64, 32)
#: Adagrad's, in each runtime. With 0.1, the default of most, the rows of the table would hardly change.
LEARNING_RATE, ACCUMULATOR, EPSILON = 0.02, 1e-6, 1e-12
#: The largest absolute value of a row's initial numbers.
SCALE = 0.05

#: Ids i32[batch, FIELDS], numbers f32[batch, NUMBERS] and clicks f32[batch].
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def parser() -> argparse.ArgumentParser:
    """The options of every training process. `batches` is the number that each worker draws."""
    options = argparse.ArgumentParser()
    for name in ("rows", "batch", "batches"):
        options.add_argument(f"--{name}", type=int, required=True)
    return options


def initial_table(rows: int) -> np.ndarray:
    """The table's initial values, f32[rows, COLUMNS]: a formula that each runtime can compute where the table is."""
    return (SCALE * np.sin(np.arange(rows * COLUMNS, dtype=np.float32))).reshape(rows, COLUMNS)


def initial_layers() -> list[tuple[np.ndarray, np.ndarray]]:
    """Kernel and bias of each layer; the first layer takes the rows of an example and its numbers."""
    draw = np.random.default_rng(0)
    widths = (FIELDS * COLUMNS + NUMBERS, *HIDDEN, 1)
    return [
        (draw.normal(0, (2 / m) ** 0.5, (m, n)).astype(np.float32), np.zeros(n, np.float32))
        for m, n in itertools.pairwise(widths)
    ]


def batches(given: argparse.Namespace, index: int, workers: int) -> list[Batch]:
    """The batches of a worker."""
    return [draw(number * workers + index, given.batch, given.rows) for number in range(given.batches)]


def draw(seed: int, count: int, rows: int) -> Batch:
    """Draw examples.

    A field has 10 to 1,000,000 values; the kth has a probability in proportion to 1 / k. Each has a hidden
    weight; the click's log odds are the sum of those of an example, and of its numbers with weights of their own.
    """
    draw = np.random.default_rng(seed)
    sizes = np.geomspace(10, 1e6, FIELDS)
    values = (sizes ** draw.random((count, FIELDS))).astype(np.uint64)
    numbers = draw.normal(size=(count, NUMBERS)).astype(np.float32)
    mixed = values * np.uint64(FIELDS) + np.arange(FIELDS, dtype=np.uint64)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    weights = (mixed * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(40)) / 2.0**24 - 0.5
    odds = weights.sum(1) + numbers @ np.linspace(-0.4, 0.4, NUMBERS) - 1
    clicks = draw.random(count) < 1 / (1 + np.exp(-odds))
    return (mixed % np.uint64(rows)).astype(np.int32), numbers, clicks.astype(np.float32)


def train(losses: Iterator[Any], began: float) -> None:
    """Do a first step, then as many as each line of the input says; print their time in s and mean loss as JSON.

    losses  yields the loss of each training step. It may be still computed, and is read at the end of the round
    began   time of the end of the process's imports, by `time.perf_counter`
    """
    loss = float(next(losses))
    _print(first_s=time.perf_counter() - began, loss=loss)
    for line in sys.stdin:
        started = time.perf_counter()
        found = [next(losses) for _ in range(int(line))]
        loss = float(np.mean([float(each) for each in found]))
        _print(s=time.perf_counter() - started, loss=loss)


def _print(**found: float) -> None:
    print("measured " + json.dumps(found), flush=True)
