"""Parts of a measurement that the workers of a cluster share: each is measured by one of them, and read by all.

Invariants: each part is in the result once. A part whose task died before it was reported is claimed again; it is a
function of its number alone, so the variable that holds it has the same bytes, whichever task made it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import replace

from dflow.distributed.asynchronous.worker_claims import claimed
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.training.work_messages import ClaimSteps
from dflow.statistics.column_statistics import ColumnStatistics, decoded, encoded
from dflow.tracing.errors import DflowError, InputError
from dflow.tracing.source import caller
from dflow.tracing.state.resources import Variable

#: Returns the statistics of the pieces of these numbers, by the position of the column.
Measure = Callable[[range], dict[str, ColumnStatistics]]


class Measurements:
    """The names of the measurements that this process has begun on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._names = set[str]()

    def begin(self, name: str) -> None:
        """Note a name. Raises InputError for one that was begun before, whose result would be returned again."""
        if name in self._names:
            raise InputError(
                f"statistics {name!r}: expected a new name for each call, got one for the second time",
                "name the data in it",
                at=caller(),
            )
        self._names.add(name)


def merged_parts(cluster: Cluster, title: str, count: int, measure: Measure) -> dict[str, ColumnStatistics]:
    """Return the statistics of `count` pieces, which the workers that call this with one `title` share."""
    wanted = str(max(1, min(count, len(cluster.colleagues()[0]))))
    parts = int(cluster.decide(f"{title}: number of parts", wanted) or wanted)
    # A job that goes on from a snapshot decides again, and still has the parts of before.
    title = f"{title} in {parts} parts"
    claim = ClaimSteps(title, cluster.task, parts, is_training=False)
    given = claimed(cluster.coordinator, claim)
    while given.count:
        sizes = dict[str, float]()
        try:
            for part in given.steps:
                data = encoded(measure(range(part, count, parts)))
                _publish(cluster, title, part, data)
                sizes[str(part)] = len(data)
        except BaseException:
            with suppress(DflowError):  # the other workers measure these parts
                claimed(cluster.coordinator, replace(claim, more=False))
            raise
        given = claimed(cluster.coordinator, replace(claim, done=given.count, sums=sizes))
    merged: dict[str, ColumnStatistics] = {}
    for part in range(parts):
        for name, column in decoded(_read(cluster, title, part, int(given.sums[str(part)]))).items():
            if name in merged:
                merged[name].merge(column)
            else:
                merged[name] = column
    for column in merged.values():
        column.finish()
    return merged


def _publish(cluster: Cluster, title: str, part: int, data: bytes) -> None:
    held = np.frombuffer(data, np.uint8)
    with cluster.parameter_servers():
        Variable(lambda: held, name=_name(title, part), trainable=False)


def _read(cluster: Cluster, title: str, part: int, size: int) -> bytes:
    with cluster.parameter_servers():
        held: Any = Variable(lambda: np.zeros(size, np.uint8), name=_name(title, part), trainable=False)
    return np.asarray(held.read()).tobytes()


def _name(title: str, part: int) -> str:
    return f"{title}/part {part}"
