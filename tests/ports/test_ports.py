"""Five programs in dflow's idiom beside twins in plain JAX: in one process, with microbatches, and on a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

import dflow
from dflow.testing import memory_cluster
from tests.ports import classifier, factorisation, gpt, ppo, vae
from tests.ports.compare import assert_alike, port_metrics, twin_metrics

PORTS = [gpt, ppo, classifier, vae, factorisation]
each_port = pytest.mark.parametrize("port", PORTS, ids=lambda port: port.__name__)
#: The same list for tests on a cluster, where a second Python runs only `ppo`.
each_port_once = pytest.mark.parametrize(
    "port",
    [port if port is ppo else pytest.param(port, marks=pytest.mark.once) for port in PORTS],
    ids=lambda port: port.__name__,
)


@each_port
def test_a_port_alone_reports_what_its_twin_does(port: ModuleType) -> None:
    assert_alike(port_metrics(port, dflow.connect(), 1), twin_metrics(port, 1))


@pytest.mark.once
@each_port_once
def test_a_port_with_microbatches_reports_what_its_twin_does(port: ModuleType) -> None:
    if port is ppo and "fusion_emitters=false" in os.environ["XLA_FLAGS"]:
        pytest.skip("clipping amplifies a last bit that XLA rounds differently; Python 3.12 runs it")
    assert_alike(port_metrics(port, dflow.connect(), 2), twin_metrics(port, 2))


@pytest.fixture
def worker() -> Iterator[Any]:
    with memory_cluster(ps=2) as memory, closing(memory.worker()) as cluster:
        yield cluster


@each_port_once
def test_a_port_on_a_cluster_reports_what_its_twin_does(port: ModuleType, worker: Any) -> None:
    assert_alike(port_metrics(port, worker, 1), twin_metrics(port, 1))
