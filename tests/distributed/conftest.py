"""A cluster in memory and one of its workers; a file that needs another cluster defines `memory` itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from dflow.distributed.worker.cluster import Cluster
from dflow.testing import MemoryCluster, memory_cluster


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def worker(memory: MemoryCluster) -> Iterator[Cluster]:
    with closing(memory.worker()) as joined:
        yield joined
