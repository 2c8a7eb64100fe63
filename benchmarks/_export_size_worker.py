"""A worker of `benchmarks.export_size`: makes a table on the tasks, and exports it in each form on a signal.

It waits for a line on the file `--go` before each export, and prints `done FORM SECONDS` after it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax.numpy as jnp

import dflow

COLUMNS = 16
#: Time between two looks for the word to go on, in s.
LOOK_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--forms", nargs="+", required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    with cluster.parameter_servers():
        table = dflow.Embedding(given.rows, COLUMNS, name="table")
    print("done made 0", flush=True)
    for form in given.forms:
        while not (given.folder / f"go-{form}").exists():
            time.sleep(LOOK_S)
        started = time.perf_counter()
        weights = None if form == "float32" else form
        exported = dflow.export(table, dflow.spec("b, n", jnp.int32), platforms=["cpu"], weights=weights)
        exported.save(given.folder / form)
        print(f"done {form} {time.perf_counter() - started}", flush=True)
    while not (given.folder / "go-end").exists():
        time.sleep(LOOK_S)
    cluster.close()


if __name__ == "__main__":
    main()
