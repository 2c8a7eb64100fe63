"""Reads files by `dflow.data.read` for `benchmarks.readers`: prints the time of all batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np

import dflow

BATCH, WINDOW, READERS = 512, 10_000, 2


def main() -> None:
    way, kind, folder = sys.argv[1:]
    if way == "dflow, by readers" and "DFLOW_JOB" not in os.environ:
        jobs = ["--ps", "0", "--workers", "1", "--job", f"reader={READERS}"]
        words = [sys.executable, "-m", "dflow", "launch", *jobs, *sys.argv]
        sys.exit(subprocess.run(words, check=False).returncode)
    rows = dflow.data.read(f"{folder}/*.{kind}", ids=[] if way == "dflow" else ["user"], parts=READERS)
    data = dflow.data.batches(rows, BATCH, shuffle=WINDOW)
    if way != "dflow, by readers":
        print(json.dumps({"s": read(data)}))
        return
    cluster = dflow.connect()
    if cluster.task.startswith("/job:reader"):
        dflow.data.serve(data, cluster)
    else:
        served = dflow.data.served(data, cluster)
        len(served)
        print("\n" + json.dumps({"s": read(served)}), flush=True)
    cluster.close()


def read(batches: object) -> float:
    """Take all batches; return the time, in s."""
    started, count = time.perf_counter(), 0
    for number in range(len(batches)):  # type: ignore[arg-type]
        batch = batches[number]  # type: ignore[index]
        count += int(np.asarray(batch["number"] >= 0).sum())
    assert count, "expected rows"
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
