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
from dflow.tracing.errors import DflowError, InternalError
from dflow.tracing.state.resources import Variable

#: Returns the statistics of the pieces of these numbers, by the position of the column.
Measure = Callable[[range], dict[str, ColumnStatistics]]


def merged_parts(cluster: Cluster, title: str, count: int, measure: Measure) -> dict[str, ColumnStatistics]:
    """Return the statistics of `count` pieces, which the workers that call this with one `title` share."""
    wanted = str(max(1, min(count, len(cluster.colleagues()[0]))))
    parts = int(cluster.decide(f"{title}: number of parts", wanted) or wanted)
    claim = ClaimSteps(title, cluster.task, parts, is_training=False)
    given = claimed(cluster.coordinator, claim)
    while given.count:
        try:
            for part in given.steps:
                _publish(cluster, title, part, encoded(measure(range(part, count, parts))))
        except BaseException:
            with suppress(DflowError):  # the other workers measure these parts
                claimed(cluster.coordinator, replace(claim, more=False))
            raise
        given = claimed(cluster.coordinator, replace(claim, done=given.count))
    merged: dict[str, ColumnStatistics] = {}
    for part in range(parts):
        for name, column in decoded(_read(cluster, title, part)).items():
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
    cluster.decide(f"{title}: bytes of part {part}", str(len(data)))


def _read(cluster: Cluster, title: str, part: int) -> bytes:
    size = cluster.decide(f"{title}: bytes of part {part}", None)
    if size is None:
        raise InternalError(f"{title}: expected the size of part {part}, which was reported, got none")
    with cluster.parameter_servers():
        held: Any = Variable(lambda: np.zeros(int(size), np.uint8), name=_name(title, part), trainable=False)
    return np.asarray(held.read()).tobytes()


def _name(title: str, part: int) -> str:
    return f"{title}/part {part}"
