"""A worker of `benchmarks.checkpoint`: saves or restores the state of a cluster, and prints the times in s."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import jax.numpy as jnp

import dflow

#: The state: arrays of as many rows of 256 numbers as fill the size.
ARRAYS, COLUMNS = 6, 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("save", "restore"), required=True)
    parser.add_argument("--path", required=True)
    for name in ("mib", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    rows = given.mib * 2**20 // (ARRAYS * COLUMNS * 4)
    cluster = dflow.connect()
    filled = 1.0 if given.what == "save" else 0.0
    with cluster.parameter_servers():
        state = dflow.variables({f"v{number}": partial(jnp.full, (rows, COLUMNS), filled) for number in range(ARRAYS)})
    times = []
    for _ in range(given.rounds + 1):
        started = time.perf_counter()
        if given.what == "save":
            dflow.save(given.path, state, overwrite=True)
        else:
            dflow.restore(given.path, state)
        times.append(time.perf_counter() - started)
    if float(state["v0"].read()[0, 0]) != 1.0:
        raise SystemExit("the state was not restored")
    cluster.close()
    print("times " + json.dumps(times[1:]), flush=True)


if __name__ == "__main__":
    main()
