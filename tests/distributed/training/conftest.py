"""Three workers and two parameter tasks of a cluster in this process, for the tests of strategies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps import steps_ahead
from dflow.testing import MemoryCluster
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.training.sync_programs import SOON


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[list[Cluster]]:
    with (
        closing(memory.worker(0, SOON)) as a,
        closing(memory.worker(1, SOON)) as b,
        closing(memory.worker(2, SOON)) as c,
    ):
        yield [a, b, c]


@pytest.fixture
def no_pause_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a loop may pause for longer than its steps take."""
    monkeypatch.setattr(steps_ahead, "SHORT_S", 60.0)


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    """Two workers of a cluster with snapshots."""
    with closing(Tasks(tmp_path, every_s=0.05, workers=2)) as running:
        yield running
