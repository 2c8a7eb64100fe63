"""Holds a port, step by step, to its twin in plain JAX: the same metrics to what float32 can keep."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

import dflow

#: How far the metrics of a step may be apart, and by how much more where they are near zero.
RELATIVE, ABSOLUTE = 2e-4, 2e-5


@functools.cache
def twin_metrics(port: ModuleType, microbatches: int) -> list[dict[str, float]]:
    """What the twin reports of each step."""
    return _as_floats(port.train(microbatches))


def port_metrics(port: ModuleType, cluster: Any, microbatches: int) -> list[dict[str, float]]:
    """What the port reports of each step, trained on `cluster` as a user's program would be."""
    step = port.build(cluster, microbatches)
    batches = list(port.batches())
    strategy = dflow.distributed.Async(cluster)
    return _as_floats(strategy.run(step, batches, steps=len(batches), name=f"{port.__name__}, {microbatches}"))


def assert_alike(got: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """Every metric of every step, and no other; of those that have moved at all."""
    assert len(got) == len(wanted)
    for name in wanted[0]:
        found, right = ([metrics.pop(name) for metrics in steps] for steps in (map(dict, got), map(dict, wanted)))
        assert len(set(right)) > 1, f"{name} is {right[0]} in every step, which compares nothing"
        np.testing.assert_allclose(found, right, rtol=RELATIVE, atol=ABSOLUTE, err_msg=name)
    assert got[0].keys() == wanted[0].keys()


def _as_floats(steps: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in metrics.items()} for metrics in steps]
