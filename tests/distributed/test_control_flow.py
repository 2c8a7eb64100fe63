"""Branches and loops over the tasks of a cluster: results, remaining state, and early ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster
from dflow.tracing.errors import RemoteError

DEADLINE_S = 60.0


def two_variables(worker: Cluster) -> tuple[dflow.Variable, dflow.Variable]:
    with worker.parameter_servers():
        a = dflow.Variable(lambda: jnp.ones(3), name="a")
        b = dflow.Variable(lambda: jnp.full(3, 2.0), name="b")
    assert a.device != b.device
    return a, b


def held_by(memory: MemoryCluster, worker: Cluster) -> list[tuple[int, int, int, int]]:
    """State of steps that each task holds: runs, open steps, values and waiters."""
    servers = [worker.server, *(task.server for task in memory.tasks.values())]
    found = [(server.statistics().running, server.statistics().rendezvous) for server in servers]
    return [(running, held.open_steps, held.values, held.waiters) for running, held in found]


NOTHING = [(0, 0, 0, 0)] * 3


def test_loops_within_loops_and_a_test_that_reads_state(memory: MemoryCluster, worker: Cluster) -> None:
    a, b = two_variables(worker)

    @dflow.jit
    def step(limit: Any) -> Any:
        def outer(c: Any) -> Any:
            def inner(i: Any, c: Any) -> Any:
                b.assign(b.read() + a.read())
                return lax.cond(i % 2 == 0, lambda c: c + b.read().sum(), lambda c: c - a.read().sum(), c)

            c = lax.fori_loop(0, 3, inner, c)
            a.assign(a.read() + b.read() / 4)
            return c

        return lax.while_loop(lambda c: a.read()[0] < limit, outer, jnp.float32(0))

    first, second, c = np.ones(3), np.full(3, 2.0), 0.0
    while first[0] < 20:
        for i in range(3):
            second = second + first
            c = c + second.sum() if i % 2 == 0 else c - first.sum()
        first = first + second / 4
    np.testing.assert_allclose(step(20.0), c, rtol=1e-6)
    np.testing.assert_allclose(a.read(), first, rtol=1e-6)
    np.testing.assert_allclose(b.read(), second, rtol=1e-6)
    assert held_by(memory, worker) == NOTHING


def test_the_gradient_of_a_loop_over_tasks(worker: Cluster) -> None:
    def loss(x: Any) -> Any:
        def turn(c: Any, row: Any) -> Any:
            with dflow.device("ps:0"):
                c = jnp.sin(c * row)
            with dflow.device("ps:1"):
                return c + row, c * c

        c, rows = lax.scan(turn, x, jnp.arange(1.0, 5.0))
        return (c + rows.sum()).sum()

    x = jnp.array([0.3, 0.7])
    alone = jax.grad(loss)(x)
    there = dflow.jit(dflow.grad(loss))(x)
    np.testing.assert_allclose(there, alone, rtol=1e-5)
    sent = {(edge.source, edge.destination) for edge in worker.traffic()}
    assert {("/job:worker/task:0", "/job:ps/task:0"), ("/job:worker/task:0", "/job:ps/task:1")} & sent


def test_nothing_is_lost_that_others_write_while_a_loop_turns(memory: MemoryCluster) -> None:
    def work(index: int) -> None:
        with closing(memory.worker(index)) as cluster:
            with cluster.parameter_servers():
                count = dflow.Variable(lambda: jnp.float32(0), name="count")
            step = dflow.jit(lambda: lax.fori_loop(0, 5, lambda i, c: count.assign(count.read() + 1) or c, 0))
            ready.wait(DEADLINE_S)
            for _ in range(20):
                step()
            ready.wait(DEADLINE_S)
            totals.append(float(count))
            ready.wait(DEADLINE_S)

    ready, totals = threading.Barrier(2), list[float]()
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, index) for index in range(2)]:
            future.result(DEADLINE_S)
    assert totals == [200.0, 200.0]


@pytest.mark.parametrize("failing_turn", [0, 4])
def test_a_turn_that_fails_ends_the_loop_everywhere(memory: MemoryCluster, worker: Cluster, failing_turn: int) -> None:
    a, b = two_variables(worker)

    @dflow.jit
    def step(x: Any) -> Any:
        def turn(_: Any, c: Any) -> Any:
            a.assign(a.read() + b.read())
            b.assign(a.read() - c)
            return c + b.read()

        return lax.fori_loop(0, 8, turn, x)

    step(jnp.ones(3))
    [task] = [task for task in memory.tasks.values() if b.key in task.server.store]
    call, turns = task.server.store.call, 0

    def fail(program: Any, writes: Any, *words: Any) -> Any:
        nonlocal turns
        turns += bool(writes)
        if turns > failing_turn:
            raise FloatingPointError("no more turns")
        return call(program, writes, *words)

    task.server.store.call = fail  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="no more turns"):
        step(jnp.ones(3))
    task.server.store.call = call  # type: ignore[method-assign]
    for variable in (a, b):
        variable.assign(jnp.ones(3))  # requests are answered in order, so the cancellation has been handled
    step(jnp.ones(3))
    assert held_by(memory, worker) == NOTHING


def test_many_turns_are_kept_nowhere(memory: MemoryCluster, worker: Cluster) -> None:
    a, b = two_variables(worker)
    most = 0
    servers = [worker.server, *(task.server for task in memory.tasks.values())]
    [task] = [task for task in memory.tasks.values() if b.key in task.server.store]
    call = task.server.store.call

    def watched(*words: Any) -> Any:
        nonlocal most
        most = max(most, *(len(step) for server in servers for step in [*server.channel._rendezvous._steps.values()]))
        return call(*words)

    task.server.store.call = watched  # type: ignore[method-assign]

    @dflow.jit
    def step(x: Any) -> Any:
        def turn(_: Any, c: Any) -> Any:
            a.assign(b.read() + c)
            b.assign(a.read() / 2)
            return c + 1

        return lax.fori_loop(0, 300, turn, x)

    step(jnp.ones(3))
    assert 0 < most < 100
    assert held_by(memory, worker) == NOTHING
