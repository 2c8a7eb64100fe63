"""Clusters of task servers in memory and over sockets; `tests/distributed/transport` holds what each transport does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflow.distributed.task.task_server import TaskSettings
from tests.distributed.task.served_tasks import Cluster, MakeCluster
from tests.distributed.transports import KINDS


@pytest.fixture(params=["memory", "task"])
def make_cluster(request: pytest.FixtureRequest) -> Iterator[MakeCluster]:
    made: list[Cluster] = []

    def make(settings: TaskSettings | None = None) -> Cluster:
        made.append(Cluster(KINDS[request.param], settings or TaskSettings()))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    return make_cluster()
