"""A cluster in memory and one of its workers; a file that needs another cluster defines `memory` itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.process.termination import Terminated
from dflow.testing import MemoryCluster, memory_cluster


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def worker(memory: MemoryCluster) -> Iterator[Cluster]:
    with closing(memory.worker()) as joined:
        yield joined


@pytest.fixture
def default_termination(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default handling of SIGTERM before and after the test, which may raise `Terminated`."""
    monkeypatch.setattr(Terminated, "raised", None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)
