"""Compare the metrics of a port and of its twin in plain JAX, step by step, to float32 tolerance."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

import dflow

#: The largest relative and absolute difference of a metric.
RELATIVE, ABSOLUTE = 2e-4, 2e-5


@functools.cache
def twin_metrics(port: ModuleType, microbatches: int) -> list[dict[str, float]]:
    """Return the metrics of each step of the twin."""
    return _as_floats(port.train(microbatches))


def port_metrics(port: ModuleType, cluster: Any, microbatches: int) -> list[dict[str, float]]:
    """Return the metrics of each step of the port, trained on `cluster` like a user's program."""
    step = port.build(cluster, microbatches)
    batches = list(port.batches())
    strategy = dflow.distributed.Async(cluster)
    return _as_floats(strategy.run(step, batches, steps=len(batches), name=f"{port.__name__}, {microbatches}"))


def assert_alike(got: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """Assert that both have equal metrics in every step, and that each metric changes from step to step."""
    assert len(got) == len(wanted)
    for name in wanted[0]:
        found, right = ([metrics.pop(name) for metrics in steps] for steps in (map(dict, got), map(dict, wanted)))
        assert len(set(right)) > 1, f"{name} is {right[0]} in every step, which compares nothing"
        np.testing.assert_allclose(found, right, rtol=RELATIVE, atol=ABSOLUTE, err_msg=name)
    assert got[0].keys() == wanted[0].keys()


def _as_floats(steps: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in metrics.items()} for metrics in steps]
