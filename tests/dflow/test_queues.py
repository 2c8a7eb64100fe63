"""Queues as a user has them: their elements, their order, from several threads and on a cluster."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.task_role import join_cluster
from dflow.state_backends import LOCAL
from dflow.testing import memory_cluster
from dflow.tracing.errors import QueueError, QueueTypeError
from tests.dflow.number_queues import F32, I32, WAIT_S, drained, numbers


def test_an_element_is_a_pytree() -> None:
    queue = dflow.FIFOQueue(2, {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "n": I32}, name="pairs")
    queue.enqueue({"x": np.array([1, 2], np.float32), "n": 3})
    taken = queue.dequeue()
    assert (taken["x"].tolist(), int(taken["n"])) == ([1.0, 2.0], 3)
    assert repr(queue) == "<FIFOQueue 'pairs': queue<i32[], f32[2]>, capacity 2>"
    assert jax.tree_util.tree_leaves(queue) == []


def test_what_is_enqueued_is_not_changed_by_its_owner() -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((64,), jnp.float32))
    # JAX could use memory with this alignment without a copy.
    memory = np.zeros(64 * 4 * 4, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][: 2 * 64 * 4].view(np.float32).reshape(2, 64)
    queue.enqueue(array[0])
    queue.enqueue_many(array)
    dflow.jit(queue.enqueue)(array[0])
    array += 1
    assert [np.asarray(queue.dequeue()).sum() for _ in range(4)] == [0, 0, 0, 0]


def test_a_padding_queue_pads_to_the_largest() -> None:
    queue = dflow.PaddingFIFOQueue(4, dflow.PaddedSpec((None, 2), jnp.float32), name="ragged")
    for length in (1, 3, 2):
        queue.enqueue(jnp.ones((length, 2)))
    assert queue.dequeue().shape == (1, 2)
    assert queue.dequeue_many(2)[:, :, 0].tolist() == [[1, 1, 1], [1, 1, 0]]
    dflow.jit(queue.enqueue)(jnp.ones((3, 2)))
    with pytest.raises(
        QueueError, match=r"dequeue in traced code from queue 'ragged', whose elements have no one shape"
    ):
        dflow.jit(queue.dequeue)()
    with pytest.raises(QueueTypeError, match=r"holds f32\[\?,2\] but enqueue was given f32\[3\]"):
        queue.enqueue(jnp.ones(3))
    with pytest.raises(QueueError, match=r"leaves a dimension open, \(None, 2\)"):
        dflow.FIFOQueue(4, dflow.PaddedSpec((None, 2), jnp.float32))


def test_a_queue_is_gone_with_its_last_user() -> None:
    queue = numbers(1)
    key = queue.key
    assert float(dflow.jit(queue.dequeue)()) == 1
    del queue
    jax.clear_caches()
    gc.collect()
    with pytest.raises(dflow.DflowError, match=r"no resource .* is held here"):
        LOCAL.store.resource(key)


def test_threads_of_compiled_steps_account_for_every_element() -> None:
    capacity = 1
    threads, turns, many = 4, 10, 3
    queue = dflow.FIFOQueue(capacity, (I32, F32), name="stress")
    taken, steps = dflow.Variable(jnp.zeros(threads * turns * many), name="taken"), dflow.Variable(0, name="steps")

    @dflow.jit
    def produce(producer: Any) -> None:
        def turn(number: Any, _: Any) -> Any:
            first = producer * turns * many + number * many
            queue.enqueue_many((first + jnp.arange(many, dtype=jnp.int32), jnp.ones(many)))
            return None

        jax.lax.fori_loop(0, turns, turn, None)

    @dflow.jit
    def consume() -> Any:
        def turn(_: Any, last: Any) -> Any:
            number, one = queue.dequeue()
            taken.assign_add(jnp.zeros(threads * turns * many).at[number].set(one))
            steps.assign_add(1)
            return number

        return jax.lax.fori_loop(0, turns * many, turn, jnp.int32(0))

    with ThreadPoolExecutor(2 * threads) as pool:
        running = [pool.submit(produce, producer) for producer in range(threads)]
        running += [pool.submit(consume) for _ in range(threads)]
        for one in running:
            one.result(WAIT_S)
    assert taken.read().tolist() == [1.0] * (threads * turns * many)
    assert int(steps.read()) == threads * turns * many
    assert int(queue.size()) == 0


def test_a_step_on_a_cluster_uses_queues_of_its_own_process() -> None:
    with memory_cluster(ps=1, workers=1) as cluster:
        store = LOCAL.store
        worker = join_cluster(
            cluster.coordinator.address, cluster.network, job="worker", index=0, store=store, address=""
        )
        with worker.parameter_servers():
            w = dflow.Variable(1.0, name="w")
        queue = numbers(2, 3)

        @dflow.jit
        def step() -> Any:
            w.assign_add(queue.dequeue())
            queue.enqueue(w.read())
            return w.read()

        assert float(step()) == 3
        assert drained(queue) == [3, 3]
        for number in (1.0, 2.0):
            queue.enqueue(number)
        loop = dflow.jit(lambda: jax.lax.fori_loop(0, 2, lambda _, c: c + queue.dequeue() * w.read(), 0.0))
        assert float(loop()) == 9
        worker.close()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_what_is_in_a_queue_is_not_taken_away_by_donating_what_was_put_in(traced: bool, many: bool) -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((3,), jnp.float32), name="q")
    put = queue.enqueue_many if many else queue.enqueue

    def step(x: Any) -> Any:
        y = x if not traced else x * 1
        put(y)
        return y

    given = jnp.ones((2, 3) if many else 3)
    given_back = (dflow.jit(step) if traced else step)(given)
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    for array in {id(array): array for array in (given, given_back)}.values():
        donate(array)
    np.testing.assert_array_equal(queue.dequeue(), [1, 1, 1])
