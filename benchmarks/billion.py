"""Does a table of over a billion parameters train on one machine, and does a step's time depend on the table's size?

A table of float32 with 64 columns and its Adagrad slots lie on 4 ps tasks, a quarter each. One worker looks up 2,048
ids of a batch, sums 8 rows for each example, and applies the gradient. The same for a table 64 times smaller, in
alternating rounds of one run. `/ small` is the ratio of the medians, round by round. `peak` is the highest memory of a
ps task at any time, from its creation of both tables on, as Linux counts it (VmHWM); `held` is what the variables on it
take.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks._launched import ROOT, figures_in, launch, processes
from benchmarks._paired import median_ratio, options, publish

COLUMNS, BATCH, PS = 64, 256, 4
#: Rows of the table: 1,006,632,960 parameters.
ROWS = 15 << 20
RUN_S = 1200
MB = 1e6


def main() -> None:
    given = options(__doc__, rounds=5, steps=100, small=False)
    rows = 1 << 14 if given.small else ROWS
    sizes = (rows // 64, rows)
    run, peaks = measured(sizes, given)
    small = [statistics.median(round_) for round_ in run["times"][str(sizes[0])]]
    table = []
    for size in sizes:
        medians = [statistics.median(round_) for round_ in run["times"][str(size)]]
        ratio, low, high = median_ratio(medians, small)
        table.append(
            {
                "parameters": size * COLUMNS,
                "median ms": 1e3 * statistics.median(medians),
                "examples/s": BATCH / statistics.median(medians),
                "/ small": ratio,
                "p10": low,
                "p90": high,
                "sent KB": run["sent"][str(size)] / 1e3,
                "created s": run["made_s"][str(size)],
                "held MB": 2 * 4 * size * COLUMNS / PS / MB,
                "peak MB": max(peaks.values()) / MB,
            }
        )
    publish("billion", table, as_json=given.json)


def measured(sizes: tuple[int, ...], given: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the worker's figures, and the peak memory of each ps task in bytes."""
    words = ["--rows", *map(str, sizes), "--steps", str(given.steps), "--rounds", str(given.rounds), "--ps", str(PS)]
    command, environment = launch("_billion_worker.py", words, ps=PS, workers=1)
    peaks: dict[str, int] = {}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launched:
        watching = threading.Thread(target=_watch, args=(launched, peaks), daemon=True)
        watching.start()
        output, _ = launched.communicate(timeout=RUN_S)
    return figures_in(output), peaks


def _watch(launched: subprocess.Popen[str], peaks: dict[str, int]) -> None:
    """Note the peak memory of each ps task, twice a second, until the launcher ends."""
    while launched.poll() is None:
        try:
            for role, process in processes(launched.pid).items():
                if role.startswith("ps"):
                    peaks[role] = max(peaks.get(role, 0), _peak_bytes(process))
        except (OSError, StopIteration, ValueError):
            pass  # a process starts or ends
        time.sleep(0.5)


def _peak_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise ValueError(process)


if __name__ == "__main__":
    main()
