"""Measure a task's part of a snapshot when few rows of a large table have changed.

A table of `--mib` MiB is written whole, then a share of its rows changes and its part is written again, as changed rows
or whole, beside a whole part. The files are flushed to the disk. Each round changes other rows.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._paired import in_turn, options, publish
from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.files.changed_rows import ChangedArrays, WrittenBytes, fill_with_changes, read_changed_arrays

#: Number of floats of a row, and shares of the rows that change.
WIDTH = 64
SHARES = (0.0, 0.0001, 0.001, 0.01, 0.1, 1.0)


def main() -> None:
    given = options(__doc__, rounds=5, mib=256)
    folder = Path(tempfile.mkdtemp())
    try:
        rows = [row(folder, share, given.mib, given.rounds) for share in SHARES]
        publish("snapshots", rows, as_json=given.json)
    finally:
        shutil.rmtree(folder)


def row(folder: Path, share: float, mib: int, rounds: int) -> dict[str, Any]:
    count = mib * 2**20 // (4 * WIDTH)
    table = jax.random.normal(jax.random.key(0), (count, WIDTH))
    write(folder / "older", table, None)
    older, draws = read_changed_arrays(folder / "older"), np.random.default_rng(0)

    def part(older: ChangedArrays | None) -> tuple[float, WrittenBytes]:
        indices = draws.choice(count, int(count * share), replace=False)
        changed = jax.block_until_ready(table.at[jnp.array(indices)].add(1))
        started = time.perf_counter()
        written = write(folder / "new", changed, older)
        return time.perf_counter() - started, written

    ways: dict[str, Callable[[], tuple[float, WrittenBytes]]] = {
        "changes": lambda: part(older),
        "whole": lambda: part(None),
    }
    found = in_turn(ways, rounds)
    shutil.rmtree(folder / "older")
    shutil.rmtree(folder / "new")
    took = {way: statistics.median(s for s, _ in measured) for way, measured in found.items()}
    size = {way: measured[-1][1].written_bytes for way, measured in found.items()}
    return {
        "rows changed": f"{share:.2%}",
        "MB written": size["changes"] / 1e6,
        "MB whole": size["whole"] / 1e6,
        "bytes / whole": size["changes"] / size["whole"],
        "s": took["changes"],
        "s whole": took["whole"],
        "time / whole": took["changes"] / took["whole"],
    }


def write(place: Path, table: jax.Array, older: ChangedArrays | None) -> WrittenBytes:
    with whole_folder(place, marker=MANIFEST, overwrite=True) as folder:
        return fill_with_changes(folder, {"table": table}, older, {})


if __name__ == "__main__":
    main()
