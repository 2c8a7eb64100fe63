"""How long is a step in which nothing is computed: what the runtime itself costs (section 6.2 of the OSDI 2016 paper)?

Every worker fetches from every shard, computes next to nothing, sends a trivial update to every shard, and waits for
the other workers. Each task is a process. *scalar* fetches one number from each shard; *dense* the whole model of so
many MB; *sparse* 32 random rows of a table of `--mb` MB. *raw* is the same bytes over plain TCP sockets between as many
processes, in the same run, round by round. The paper's own line is of 16 ps tasks on as many machines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._null_step_worker import COLUMNS, ROWS_FETCHED
from benchmarks._paired import median_ratio, options, publish
from benchmarks._raw_sockets import raw_servers

ROOT = Path(__file__).parents[1]
ROUNDS = 5
#: Median step times of 1 and of 100 workers, in ms.
PAPER = {"scalar": "1.8 to 8.8", "dense 100": "147 to 613", "dense 1000": "1010 to 7160", "sparse": "5 to 20"}


def main() -> None:
    given = options(__doc__, ps=2, workers=1, kind=("scalar", "dense", "sparse"), mb=100, steps=400, rounds=ROUNDS)
    row = measured(given.kind, given.ps, given.workers, given.mb, given.steps, given.rounds)
    publish("null_step", [row], as_json=given.json)


def measured(kind: str, ps: int, workers: int, mb: int, steps: int, rounds: int) -> dict[str, Any]:
    """A line of the table."""
    each = max(1, steps // rounds)
    ask, reply = request_bytes(kind, ps, mb)
    with raw_servers(ps, workers, ask, reply) as ports:
        numbers = {"ps": ps, "workers": workers, "mb": mb, "steps": each, "rounds": rounds, "ask": ask, "reply": reply}
        words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        times = run_workers(ps, workers, ["--kind", kind, *words, "--ports", *map(str, ports)])
    ours, raws = ([statistics.median(round_) for round_ in times[way]] for way in ("dflow", "raw"))
    ratio, low, high = median_ratio(ours, raws)
    every = sorted(time for round_ in times["dflow"] for time in round_)
    return {
        "kind": kind,
        "ps": ps,
        "workers": workers,
        "MB": mb if kind != "scalar" else 0,
        "median ms": 1e3 * statistics.median(every),
        "p90 ms": 1e3 * every[len(every) * 9 // 10],
        "raw ms": 1e3 * statistics.median(time for round_ in times["raw"] for time in round_),
        "ratio": ratio,
        "p10": low,
        "p90": high,
        "paper ms": PAPER.get(kind) or PAPER.get(f"{kind} {mb}", ""),
    }


def request_bytes(kind: str, ps: int, mb: int) -> tuple[int, int]:
    """How many bytes a worker asks a shard with, and is answered by."""
    if kind == "scalar":
        return 4, 4
    if kind == "dense":
        return 4, mb * 1_000_000 // ps
    rows = ROWS_FETCHED // ps
    return 4 * rows, 4 * COLUMNS * rows


def run_workers(ps: int, workers: int, words: list[str]) -> dict[str, list[list[float]]]:
    """The times of worker 0, in s: by way, round and step."""
    script = str(ROOT / "benchmarks" / "_null_step_worker.py")
    command = [sys.executable, "-m", "dflow", "launch", "--ps", str(ps), "--workers", str(workers), script, *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[worker:0] times ")]
    if ended.returncode or not lines:
        raise SystemExit(f"the cluster failed with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    found: dict[str, list[list[float]]] = json.loads(lines[0].removeprefix("[worker:0] times "))
    return found


if __name__ == "__main__":
    main()
