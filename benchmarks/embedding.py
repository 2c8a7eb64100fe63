"""How long does a training step over large embedding tables take, and does it depend on their size?

The step is matrix factorisation: it looks up 1,024 rows of each of two tables with 64 columns, takes the gradient of a
squared error, and updates both tables by SGD, Adagrad or lazy Adam (which updates the rows that were looked up). It
runs in one process, and on a cluster with 1 worker and 2 ps tasks that hold a table each. One process trains the tables
of all sizes, a round of each size after the other. `/ smallest` is the time over that of the smallest tables in the
same round.

`--beside PYTHON` names an environment with TensorFlow and PyTorch. Both run the same step there with their own sparse
updates: TensorFlow in graph mode, in one process and on a cluster; PyTorch, which has no parameter servers, in one
process. `temporary MB` is what XLA allocates for the step beside its arguments, `touched MB` what the step reads and
writes of variables, with the indices, `sent KB` what the worker sends in a step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._launched import figures_in
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks.null_step import by_tasks

ROOT = Path(__file__).parents[1]
RULES = ("sgd", "adagrad", "lazy_adam")
MILLIONS = (3, 50, 200)
RUN_S = 900

#: The figures of a run: "times", the time of each step in s by millions of parameters and round, and dflow's "counted".
Run = dict[str, Any]


def main() -> None:
    given = options(__doc__, rounds=5, steps=20, turns=3, beside=None, small=False)
    sizes = (1, 2) if given.small else MILLIONS
    rows = [row for rule in RULES for is_cluster in (False, True) for row in measured(rule, is_cluster, sizes, given)]
    publish("embedding", rows, as_json=given.json)


def measured(rule: str, is_cluster: bool, sizes: tuple[int, ...], given: Any) -> list[dict[str, Any]]:
    """Return the rows of one rule, standalone or on a cluster."""
    words = ["--rule", rule, "--millions", *map(str, sizes), "--steps", str(given.steps), "--rounds", str(given.rounds)]
    ways: dict[str, Callable[[], Run]] = {"dflow": lambda: by_dflow(words, is_cluster)}
    if given.beside:
        ways["TensorFlow"] = lambda: by_peer("tensorflow", given.beside, words, is_cluster)
        if not is_cluster:
            ways["PyTorch"] = lambda: by_peer("torch", given.beside, words, False)
    runs = in_turn(ways, given.turns)
    return [line(rule, is_cluster, str(millions), str(sizes[0]), runs) for millions in sizes]


def line(rule: str, is_cluster: bool, millions: str, smallest: str, runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """Return a row of the table: the medians of the rounds, and the ratios round by round."""
    ours, first = medians(runs["dflow"], millions), medians(runs["dflow"], smallest)
    ratio, low, high = median_ratio(ours, first)
    row = {
        "rule": rule,
        "tasks": "2 ps, 1 worker" if is_cluster else "alone",
        "million": millions,
        "median ms": 1e3 * statistics.median(ours),
        "/ smallest": ratio,
        "p10": low,
        "p90": high,
    }
    for peer in [name for name in runs if name != "dflow"]:
        theirs = medians(runs[peer], millions)
        row |= {f"{peer} ms": 1e3 * statistics.median(theirs), f"/ {peer}": median_ratio(ours, theirs)[0]}
    return row | runs["dflow"][0]["counted"][millions]


def medians(runs: list[Run], millions: str) -> list[float]:
    """Return the median step of each round of all runs, in s."""
    return [statistics.median(round_) for run in runs for round_ in run["times"][millions]]


def by_dflow(words: list[str], is_cluster: bool) -> Run:
    """Run the step by dflow in new processes."""
    script = str(ROOT / "benchmarks" / "_embedding_dflow.py")
    cluster = ["-m", "dflow", "launch", "--ps", "2", "--workers", "1"] if is_cluster else []
    output = finished([sys.executable, *cluster, script, *words])
    return figures_in(output)


def by_peer(name: str, python: str, words: list[str], is_cluster: bool) -> Run:
    """Run the step by another framework in new processes."""
    command = [python, str(ROOT / "benchmarks" / f"_embedding_{name}.py"), *words]
    return figures_in(by_tasks(command, 2, 1, RUN_S) if is_cluster else finished(command))


def finished(command: list[str]) -> str:
    """Run a command to its end and return its output."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    return ended.stdout + ended.stderr


if __name__ == "__main__":
    main()
