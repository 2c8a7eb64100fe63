"""`python -m benchmarks._tiny NAME`: run one round of a benchmark with tiny sizes, whose figures mean nothing.

It shows that the benchmark runs. `make bench-tiny` and the tests run each one. Words after NAME replace its options.
`NAME,NAME` runs several in one process, one after the other.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._launched import TINY

ONE_ROUND = ("--rounds", "1")


def first(many: Any) -> Any:
    """Return a mapping or a sequence with only its first entry."""
    kept = itertools.islice(many.items() if isinstance(many, Mapping) else many, 1)
    return type(many)(kept)


def narrow(networks: Any) -> Any:
    """Return the first network with few channels, for small images."""
    return tuple(network.narrowed(by=16, image=63) for network in first(networks))


def to(value: Any) -> Callable[[Any], Any]:
    """Return a function that replaces any constant by `value`."""
    return lambda _: value


#: By benchmark: the changes that make its constants small, and its options.
SMALL: dict[str, tuple[dict[str, Callable[[Any], Any]], tuple[str, ...]]] = {
    "billion": ({}, (*ONE_ROUND, "--small", "--steps", "2")),
    "call_cost": ({"SIZES": first, "WORK": to(20)}, (*ONE_ROUND, "--calls", "500")),
    "checkpoint": (
        {"SMALL": to(10), "CLUSTERS": to((("save", 1), ("restore", 2)))},
        (*ONE_ROUND, "--mib", "1", "--seconds", "1"),
    ),
    "cluster_size": ({}, ("--workers", "4", "--steps", "2")),
    "convnets": ({"NETWORKS": narrow}, (*ONE_ROUND, "--compile", "0")),
    "coordinator_events": ({}, (*ONE_ROUND, "--tasks", "10")),
    "copies": ({"PROGRAMS": first, "WIDTH": to(16)}, ONE_ROUND),
    "dashboard": ({"PAGES": to(2)}, (*ONE_ROUND, "--seconds", "1")),
    "devices": ({"MODELS": first, "ROW_S": to(0.01)}, ONE_ROUND),
    "embedding": ({"RULES": first}, (*ONE_ROUND, "--small", "--steps", "2", "--turns", "1")),
    "export_size": ({"FORMS": first, "REQUESTS": to(1)}, ("--rows", "1000", "--ps", "1")),
    "host_loop": ({}, (*ONE_ROUND, "--turns", "2")),
    "input": ({"CALLS": to(2)}, (*ONE_ROUND, "--layers", "1")),
    "keras_fit": ({"PS": to(1)}, (*ONE_ROUND, "--workers", "1", "--batch", "32", "--steps", "2", "--epochs", "2")),
    "language_model": (
        {"PS": first, "SAMPLES": to(4)},
        (*ONE_ROUND, "--words", "50", "--width", "8", "--batch", "2", "--length", "3", "--steps", "2"),
    ),
    "loggers": ({"WIDTHS": to((16,))}, (*ONE_ROUND, "--steps", "5")),
    "many_variables": ({}, (*ONE_ROUND, "--sizes", "3", "--steps", "2", "--turns", "1")),
    "many_workers": (
        {"PS": to((1,)), "WORKERS": to((3,))},
        (*ONE_ROUND, "--steps", "40"),
    ),
    "memory": ({"WIDTH": to(16)}, ONE_ROUND),
    "network": (
        {
            "CLUSTERS": to({(1, 1): ("step", "lookups", "lookahead")}),
            "DELAYS_S": to((1e-4, 1e-3)),
            "LOSSES": first,
            "GIGABITS": first,
        },
        (*ONE_ROUND, "--steps", "2", "--mb", "1"),
    ),
    "null_step": ({}, (*ONE_ROUND, "--steps", "4", "--ps", "1")),
    "packing": ({"SIZES": to((2,))}, ONE_ROUND),
    "passes": ({"SIZES": to((100, 200))}, ONE_ROUND),
    "peers_training": (
        {"PS": to(1), "ROWS": to(1000), "CLICKS_BATCH": to(32), "NEAR": to(1.0), "STRATEGIES": to(("Async", "Hybrid"))},
        (*ONE_ROUND, "--model", "clicks", "--steps", "2"),
    ),
    "placement": (
        {"FAMILIES": first, "FUNCTIONS": first, "CLOCKS": first},
        (*ONE_ROUND, "--seeds", "1", "--small", "1"),
    ),
    "readers": ({}, (*ONE_ROUND, "--rows", "2000")),
    "recovery": ({"STEADY_S": to(1.0)}, (*ONE_ROUND, "--mib", "1")),
    "replicas": ({"BACKUPS": to((0,))}, (*ONE_ROUND, "--workers", "1", "--steps", "4", "--compute", "0.01")),
    "rounding": ({"RULES": first, "STEPS": to(10)}, ONE_ROUND),
    "scaling": ({"TASKS": first}, ("--steps", "2")),
    "serving": ({}, (*ONE_ROUND, "--clients", "2", "--milliseconds", "200", "--width", "8", "--alone")),
    "serving_names": ({}, (*ONE_ROUND, "--clients", "2", "--milliseconds", "200", "--names", "40")),
    "serving_tables": ({"REQUESTS": to(4)}, (*ONE_ROUND, "--clients", "2", "--milliseconds", "200", "--rows", "100")),
    "snapshots": ({"SHARES": to((0.001, 1.0))}, (*ONE_ROUND, "--mib", "2")),
    "soak": ({"PS": to(1)}, ("--steps", "80")),
    "startup": ({"PS": to(1)}, (*ONE_ROUND, "--variables", "4")),
    "step_budget": ({}, ("--steps", "2", "--ps", "1")),
    "sync_steps": ({"MODELS": to({1: (2, 64)}), "WORKERS": to((2,))}, (*ONE_ROUND, "--steps", "3")),
    "threads": ({"THREADS": to((1, 2)), "CALLS": to(20)}, ONE_ROUND),
    "table_on_disk": (
        {},
        (*ONE_ROUND, "--rows", "600000", "--ps", "1", "--percent", "90", "--ids", "64", "--steps", "2", "--warm", "2"),
    ),
    "tls": ({}, ONE_ROUND),
    "trace_time": ({"LAYERS": to(1)}, (*ONE_ROUND, "--short", "1")),
    "vocabulary": ({"ROWS": to(100), "IDS": to(64)}, (*ONE_ROUND, "--steps", "2", "--starts", "1", "--jobs", "0")),
    "transport": ({"MEGABYTES": first, "CALLS": to(20)}, ONE_ROUND),
}


def main() -> None:
    names, *words = sys.argv[1:]
    # For the processes that the benchmarks start.
    os.environ[TINY] = "1"
    for name in names.split(","):
        run(name, words)


def run(name: str, words: Sequence[str]) -> None:
    """Run one benchmark, with these words or with its small options."""
    module: Any = importlib.import_module(f"benchmarks.{name}")
    constants, options = SMALL[name]
    for constant, smaller in constants.items():
        setattr(module, constant, smaller(getattr(module, constant)))
    sys.argv = [name, *(words or options)]
    module.main()


if __name__ == "__main__":
    main()
