"""Events that the tasks of a cluster record of their steps, with every task in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.lowering.steps.step_events import (
    ITEM_BEGAN,
    ITEM_ENDED,
    RECEIVED,
    SENT,
    STEP_BEGAN,
    STEP_ENDED,
    Event,
)
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import VariableError

HERE = Path(__file__).name
PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=1) as cluster:
        yield cluster


def make_step(cluster: Cluster) -> Any:
    with cluster.parameter_servers():
        w = dflow.Variable(lambda: jnp.zeros(3), name="w")

    @dflow.jit
    def step(x: Any) -> Any:
        w.assign_add(x)
        return w.read() * 2

    return step


def events_of_last_step(memory: MemoryCluster, worker: Cluster) -> tuple[list[Event], list[Event]]:
    own, others = worker.server.recorder.events(), memory.tasks["ps:0"].server.recorder.events()
    last = max(event.step for event in own if event.what == STEP_BEGAN)
    of_ps = [event for event in others if event.step == last]
    return [event for event in own if event.step == last], of_ps


def test_each_item_begins_and_ends_once_with_its_node_and_the_users_line(
    memory: MemoryCluster, worker: Cluster
) -> None:
    make_step(worker)(jnp.ones(3))
    for events in events_of_last_step(memory, worker):
        items = [event for event in events if event.what in (ITEM_BEGAN, ITEM_ENDED)]
        assert items
        assert set(Counter((event.number, event.what) for event in items).values()) == {1}
        assert {event.number for event in items if event.what == ITEM_BEGAN} == {
            event.number for event in items if event.what == ITEM_ENDED
        }
        calls = [event for event in items if event.kind == "Call"]
        assert all(event.name.startswith("%") and HERE in event.line for event in calls)


def test_what_one_task_has_sent_is_what_the_other_received(memory: MemoryCluster, worker: Cluster) -> None:
    make_step(worker)(jnp.ones(3))
    own, ps = events_of_last_step(memory, worker)
    for sender, source, receiver, destination in ((own, WORKER, ps, PS), (ps, PS, own, WORKER)):
        sent = [(event.name, event.peer, event.size_bytes) for event in sender if event.what == SENT]
        received = [(event.name, event.peer, event.size_bytes) for event in receiver if event.what == RECEIVED]
        assert sent == [(name, destination, 12) for name, _, _ in sent]
        assert received == [(name, source, size) for name, _, size in sent]
        assert received


def test_an_error_is_noted_where_it_came_up_and_where_the_step_was_started(
    memory: MemoryCluster, worker: Cluster
) -> None:
    step = make_step(worker)
    step(jnp.ones(3))
    memory.tasks["ps:0"].server.store.table.forget("w", "it was dropped", "make it again")
    with pytest.raises(VariableError, match="it was dropped"):
        step(jnp.ones(3))
    own, ps = events_of_last_step(memory, worker)
    assert [event.text for event in ps if event.what == "item failed"] == ["VariableError"]
    (ended,) = (event for event in own if event.what == STEP_ENDED)
    assert ended.text.startswith("VariableError: ")
    assert worker.server.step_counts.totals().errors == {"VariableError": 1}
    assert worker.server.step_counts.totals().done == 1
