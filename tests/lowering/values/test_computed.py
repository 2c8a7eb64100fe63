"""A thread that is about to wait for an uncomputed value first calls the hook that was set on that thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.store import Store
from dflow.lowering.values.computed import before_waiting, wait_until_computed
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, QueueType

DEADLINE_S = 60.0
IDENTITY = jnp.eye(1000)
TYPE = ArrayType(np.dtype("float32"), (1000, 1000))

multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: x @ y, x))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    jax.block_until_ready(multiply(IDENTITY))


Counted = Callable[[Callable[[], Any]], int]


@pytest.fixture
def waits_of() -> Iterator[Counted]:
    """Run a function on a new thread; return the number of times that it was about to wait."""
    failed: list[BaseException] = []

    def count(work: Callable[[], Any]) -> int:
        waits: list[None] = []

        def do() -> None:
            before_waiting(lambda: waits.append(None))
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=do)
        thread.start()
        thread.join(DEADLINE_S)
        return len(waits)

    yield count
    assert not failed


def test_it_is_said_where_something_is_waited_for(waits_of: Counted) -> None:
    slow = multiply(IDENTITY)
    assert waits_of(lambda: wait_until_computed((np.ones(3), slow))) == 1
    assert slow.is_ready()  # type: ignore[attr-defined]
    assert waits_of(lambda: wait_until_computed((np.ones(3), slow))) == 0


def test_a_variable_that_is_still_computed_is_waited_for(waits_of: Counted) -> None:
    store = Store()
    store.create("w", TYPE, lambda: IDENTITY)
    store.replace({"w": multiply(IDENTITY)})
    assert waits_of(lambda: store.views(["w"])) == 1
    assert waits_of(lambda: store.views(["w"])) == 0


def test_rows_that_are_still_computed_are_waited_for(waits_of: Counted) -> None:
    queue = HeldQueue("q", QueueSettings(QueueKind.FIFO, 2000), QueueType((ArrayType(TYPE.dtype, (1000,)),)))
    use = ResourceOp("queue.enqueue_many")
    assert waits_of(lambda: queue.start(use, [multiply(IDENTITY)], lambda results: None)) == 1
    assert queue.depth() == (1000, 2000)
