"""What does a table cost that has only a part of its rows in memory, `max_memory=`?

A table of float32 with 16 columns lies on ps tasks, each a process of this machine; one worker trains it with `Async`.
`memory` has all of it in memory, `disk` at most `--percent` of it. Rows are looked up by a Zipf distribution, whose
frequent rows are neighbours (`--order ranks`) or anywhere in the table (`spread`). `examples/s` is the median over
rounds, after `--warm` steps, and `/ memory` its ratio. `ps MB` is the highest memory of a ps task at any time (VmHWM),
`held MB` what its variables have, and `limit MB` what of that may be in memory.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks._launched import ROOT, figures_in, launch, processes
from benchmarks._paired import options, publish
from benchmarks._table_on_disk_worker import COLUMNS

MB = 1e6
WAYS = ("memory", "disk")
#: Number of slots that each optimizer has for a row, and the row.
OPTIMIZERS = {"sgd": 1, "adagrad": 2}


def main() -> None:
    given = options(
        __doc__,
        rows=16_000_000,
        ps=4,
        percent=25,
        ids=4096,
        steps=100,
        warm=300,
        rounds=5,
        zipf="1.1",
        order=("ranks", "spread"),
        optimizer=tuple(OPTIMIZERS),
    )
    held = OPTIMIZERS[given.optimizer] * given.rows * COLUMNS * 4
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        limit = held * given.percent // 100 if way == "disk" else 0
        figures, peaks = measured(given, limit)
        speed = statistics.median(figures["examples/s"])
        row = {"table": way, "order": given.order, "examples/s": speed, "made s": figures["made s"]}
        row |= {"/ memory": speed / rows[0]["examples/s"]} if rows else {}
        row |= {"ps MB": max(peaks.values()) / MB, "held MB": held / given.ps / MB}
        rows.append(row | ({"limit MB": limit / given.ps / MB} if limit else {}))
    publish("table_on_disk", rows, as_json=given.json)


def measured(given: Any, limit: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Run the worker; return its figures, and the highest memory of each ps task in bytes."""
    names = ("rows", "ids", "steps", "warm", "rounds", "zipf", "order", "optimizer")
    words = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]
    command, environment = launch("_table_on_disk_worker.py", [*words, "--limit", str(limit)], ps=given.ps, workers=1)
    peaks: dict[str, int] = {}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as launched:
        ended = threading.Event()
        watching = threading.Thread(target=watch, args=(launched.pid, peaks, ended), daemon=True)
        watching.start()
        output, _ = launched.communicate()
        ended.set()
        watching.join()
    return figures_in(output), peaks


def watch(launcher: int, peaks: dict[str, int], ended: threading.Event) -> None:
    """Note the highest memory of each ps task, twice a second."""
    while not ended.wait(0.5):
        try:
            for role, process in processes(launcher).items():
                if role.startswith("ps"):
                    lines = Path(f"/proc/{process}/status").read_text().splitlines()
                    peaks[role] = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration, IndexError):  # a process is starting, or has ended
            continue


if __name__ == "__main__":
    main()
