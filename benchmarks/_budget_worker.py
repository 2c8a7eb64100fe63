"""A worker of `benchmarks.step_budget`: repeats a step until it is ended, and prints "warm" after the first ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import dflow
from benchmarks import _null_step_worker
from benchmarks._losses import LOSSES
from benchmarks._models import MODELS
from benchmarks._training_dflow import make_step

WARM_UP = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("ps", "layers", "width"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    step = training_step(cluster, given) if given.layers else null_step(cluster, given.ps)
    for _ in range(WARM_UP):
        step()
    print("warm", flush=True)
    while True:
        step()


def null_step(cluster: Any, ps: int) -> Callable[[], Any]:
    """The scalar step of `benchmarks.null_step`, of one worker."""
    step = _null_step_worker.make_step(cluster, argparse.Namespace(kind="scalar", ps=ps, workers=1))
    return lambda: float(step())


def training_step(cluster: Any, given: argparse.Namespace) -> Callable[[], Any]:
    """A training step of dense layers with Adam, as in `benchmarks.many_variables`."""
    model = MODELS["dense"](given.layers, given.width)
    step = make_step(cluster.parameter_servers, model, LOSSES["dense"])
    return lambda: float(step(*model.batch))


if __name__ == "__main__":
    main()
