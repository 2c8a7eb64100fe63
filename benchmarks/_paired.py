"""Measure several alternatives interleaved, so that drift of the machine's speed affects all of them equally."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

Found = TypeVar("Found")

RESULTS = Path(__file__).parent / "results"


def in_turn(ways: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """Call each of `ways` once per round, for `rounds` rounds; return each one's results (a time in s) in order.

    The order changes from round to round, in the same way in each run: a call's effect on caches and the allocator
    helps or hinders the next call, so no call may follow a certain other one, or itself, more often than the others do.
    """
    found: dict[str, list[Found]] = {name: [] for name in ways}
    orders = random.Random(0)
    for _ in range(rounds):
        for name in orders.sample(list(ways), len(ways)):
            found[name].append(ways[name]())
    return found


def median_ratio(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios round by round, with the 10th and the 90th percentile."""
    ratios = sorted(time / other for time, other in zip(times, base, strict=True))
    tenth = max(0, len(ratios) // 10)
    return statistics.median(ratios), ratios[tenth], ratios[-1 - tenth]


def seconds_per_call(fn: Callable[[], Any], calls: int) -> float:
    """Return the mean time of a call over `calls` calls, in s."""
    started = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - started) / calls


def machine() -> dict[str, str]:
    """Describe the machine and the versions of a measurement."""
    compared = ["torch"] if find_spec("torch") else []
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy", "dflow", *compared)}
    return {"python": platform.python_version(), "cpus": str(os.cpu_count()), "processor": _processor(), **versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def options(description: str | None, **defaults: int | str | tuple[str, ...] | None) -> argparse.Namespace:
    """Parse the command line: `--json`, and an option for each of `defaults`: an int, one of several words, a str."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write the figures to benchmarks/results/")
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, int):
            parser.add_argument(f"--{name}", type=int, default=default)
        elif default is None or isinstance(default, str):
            parser.add_argument(f"--{name}", default=default)
        else:
            parser.add_argument(f"--{name}", choices=default, default=default[0])
    return parser.parse_args()


def publish(name: str, rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the rows as a table; columns may differ between rows. With `as_json` write them with the machine's data."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*columns, title=name)
    for row in rows:
        values = [row.get(column, "") for column in columns]
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console(width=max(140, 12 * len(columns))).print(table)
    where = machine()
    Console().print(", ".join(f"{key} {value}" for key, value in where.items()), highlight=False)
    if as_json:
        RESULTS.mkdir(exist_ok=True)
        stem = f"{name}-jax{where['jax']}"
        (RESULTS / f"{stem}.json").write_text(json.dumps({"machine": where, "rows": list(rows)}, indent=1) + "\n")
