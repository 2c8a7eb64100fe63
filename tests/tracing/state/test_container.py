"""Containers: names, lists of names, and resets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import ContainerError, QueueError, VariableError

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    gc.collect()
    assert dflow.containers() == ()
    yield
    gc.collect()


def test_names_begin_with_the_container_and_nest() -> None:
    with dflow.container("run1"):
        w = dflow.Variable(0.0, name="w")
        with dflow.container("eval"):
            v = dflow.Variable(0.0, name="v")
        unnamed = dflow.Variable(0.0)
    outside = dflow.Variable(0.0, name="w")
    assert [w.name, v.name, outside.name] == ["run1/w", "run1/eval/v", "w"]
    assert unnamed.name.startswith("run1/variable_")
    assert dflow.containers() == ("run1", "run1/eval")
    assert "%run1/w" in str(dflow.graph(lambda: w.read() + 1))


def test_a_container_is_there_as_long_as_something_in_it_is() -> None:
    with dflow.container("a/b"):
        assert dflow.containers() == ()
        w = dflow.Variable(0.0)
    alive = weakref.ref(w)
    assert dflow.containers() == ("a", "a/b")
    del w
    gc.collect()
    assert alive() is None
    assert dflow.containers() == ()


def test_after_a_reset_every_use_says_what_happened_and_what_to_do() -> None:
    with dflow.container("run1"):
        w = dflow.Variable(jnp.ones(2), name="w")
        with dflow.container("inner"):
            v = dflow.Variable(0.0, name="v")
    kept = dflow.Variable(1.0, name="kept")
    step = dflow.jit(lambda: w.assign_add(jnp.ones(2)))
    step()
    dflow.reset_container("run1")
    message = (
        r"variable .run1/w. is gone: container .run1. was reset at test_container.py:\d+\n"
        r"  at .*test_container.py:\d+\n  make it again"
    )
    for use in (w.read, step, lambda: w.assign(jnp.zeros(2)), lambda: w.assign_add(jnp.zeros(2)), lambda: w + 1):
        with pytest.raises(VariableError, match=message):
            use()
    with pytest.raises(VariableError, match="variable 'run1/inner/v' is gone: container 'run1' was reset"):
        v.read()
    assert float(kept.read()) == 1.0
    assert dflow.containers() == ()


def test_an_inner_container_is_reset_alone_and_a_longer_name_is_another() -> None:
    made = {}
    for name in ("run1", "run1/eval", "run10"):
        with dflow.container(name):
            made[name] = dflow.Variable(1.0, name="w")
    dflow.reset_container("run1/eval")
    assert dflow.containers() == ("run1", "run10")
    dflow.reset_container("run1")
    assert float(made["run10"].read()) == 1.0
    assert dflow.containers() == ("run10",)


def test_a_queue_belongs_to_its_container_and_a_reset_ends_its_waits() -> None:
    with dflow.container("run1"):
        queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32), name="q")
    assert (queue.name, dflow.containers()) == ("run1/q", ("run1",))
    begun = dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32), name="begun")

    @dflow.jit
    def step() -> Any:
        begun.enqueue(1.0)
        return jax.lax.fori_loop(0, 2, lambda _, c: c + queue.dequeue(timeout_s=WAIT_S), 0.0)

    message = (
        r"queue 'run1/q' is gone: container 'run1' was reset at test_container.py:\d+\n"
        r"  at .*test_container.py:\d+\n  make it again"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(step)
        begun.dequeue(timeout_s=WAIT_S)
        queue.enqueue(1.0)
        dflow.reset_container("run1")
        with pytest.raises(QueueError, match=message):
            waiting.result(WAIT_S)
    for use in (step, queue.dequeue, lambda: queue.enqueue(1.0), queue.size, queue.close):
        with pytest.raises(QueueError, match=message):
            use()
    assert dflow.containers() == ()


def test_a_container_that_is_not_there_or_has_no_name_is_refused() -> None:
    with dflow.container("here"):
        w = dflow.Variable(0.0)
    with pytest.raises(ContainerError, match=r"no container 'there'; there are: here\n  at .*test_container.py"):
        dflow.reset_container("there")
    del w
    for name in ("", "a//b", "/a", "a b", "a/"):
        with pytest.raises(ContainerError, match="is not a container's name"), dflow.container(name):
            pass


def test_on_a_cluster_names_have_the_prefix_and_a_reset_drops_what_other_tasks_hold() -> None:
    with memory_cluster(ps=1, workers=1) as cluster:
        worker = cluster.worker()
        with dflow.container("run1"):
            near = dflow.Variable(1.0, name="near")
            with worker.parameter_servers():
                far = dflow.Variable(0.0, name="far")
        assert far.name == "run1/far"
        dflow.reset_container("run1")
        for variable in (near, far):
            with pytest.raises(VariableError, match=f"variable '{variable.name}' is gone: container 'run1' was reset"):
                variable.read()
        worker.close()
