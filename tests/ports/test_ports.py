"""Three programs in dflow's idiom beside twins in plain JAX: in one process with microbatches, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

import dflow
from dflow.testing import memory_cluster
from tests.ports import classifier, gpt, ppo
from tests.ports.compare import assert_alike, port_metrics, twin_metrics


def ports(*chosen: ModuleType) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("port", chosen, ids=lambda port: port.__name__)


@pytest.mark.once
@ports(gpt, classifier)  # in a scan, and one after another
def test_a_port_alone_with_microbatches_reports_what_its_twin_does(port: ModuleType) -> None:
    assert_alike(port_metrics(port, dflow.connect(), 2), twin_metrics(port, 2))


@pytest.fixture
def worker() -> Iterator[Any]:
    with memory_cluster(ps=2) as memory, closing(memory.worker()) as cluster:
        yield cluster


@ports(ppo, classifier)
def test_a_port_on_a_cluster_reports_what_its_twin_does(port: ModuleType, worker: Any) -> None:
    assert_alike(port_metrics(port, worker, 1), twin_metrics(port, 1))
