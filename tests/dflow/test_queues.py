"""Queues: their elements and order, from threads, clusters and traced code, and their errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.task_role import join_cluster
from dflow.lowering.steps import local_step
from dflow.state_backends import LOCAL
from dflow.testing import memory_cluster
from dflow.tracing.errors import PlainJitError, QueueError, QueueTypeError
from tests.dflow.number_queues import F32, I32, WAIT_S, drained, numbers
from tests.reference.interpret import interpret
from tests.reference.queue_model import QueueModel


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


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_a_loop_of_no_turns_stacks_no_keys(impl: str, shape: tuple[int, ...]) -> None:
    queue = dflow.FIFOQueue(1, F32)
    keys = jnp.broadcast_to(jax.random.key(0, impl=impl), shape)

    @dflow.jit
    def step(xs: Any) -> Any:
        def turn(carry: Any, x: Any) -> Any:
            queue.enqueue(x)
            return carry + x, (keys, x)

        return jax.lax.scan(turn, 0.0, xs)

    last, (stacked, rows) = step(jnp.zeros(0))
    assert (last, rows.shape) == (0, (0,))
    assert (stacked.shape, stacked.dtype) == ((0, *shape), keys.dtype)


def test_a_gradient_flows_past_queues_and_not_through_them() -> None:
    queue = numbers(3)

    def loss(x: Any) -> Any:
        taken = queue.dequeue()
        queue.enqueue(x * taken)
        return jax.lax.cond(x > 0, lambda: x * x * queue.dequeue(), lambda: x)

    assert float(dflow.jit(dflow.grad(loss))(2.0)) == 24
    queue.enqueue(5.0)
    assert float(jax.grad(lambda x: x * queue.dequeue())(1.0)) == 5


def test_two_queues_never_order_each_other() -> None:
    first, second, third, fourth = (numbers(name=name) for name in ("first", "second", "third", "fourth"))

    @dflow.jit
    def step() -> None:
        third_value = third.dequeue(timeout_s=WAIT_S)
        fourth.enqueue(third_value + 1)
        second.enqueue(first.dequeue(timeout_s=WAIT_S) + 1)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step)
        first.enqueue(1.0)
        # The third queue can be filled only with results of the second.
        third.enqueue(second.dequeue(timeout_s=WAIT_S))
        running.result(WAIT_S)
    assert drained(fourth) == [3]


def test_what_is_written_before_a_dequeue_does_not_wait_for_it() -> None:
    queue, variable = numbers(), dflow.Variable(0.0, name="v")
    done = threading.Event()

    @dflow.jit
    def step() -> Any:
        variable.assign(1.0)
        return queue.dequeue(timeout_s=WAIT_S)

    def feed() -> None:
        while float(variable.read()) != 1.0 and not done.is_set():
            pass
        queue.enqueue(2.0)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        assert float(step()) == 2
    finally:
        done.set()
        feeder.join(WAIT_S)


def test_who_takes_an_element_sees_what_was_written_before_it_was_put_in() -> None:
    asked, told = numbers(name="asked"), numbers(name="told")
    shared, seen = dflow.Variable(0.0, name="shared"), dflow.Variable(0.0, name="seen")

    @dflow.jit
    def write() -> None:
        def turn(i: Any, _: Any) -> Any:
            shared.assign(asked.dequeue(timeout_s=WAIT_S))
            told.enqueue(0.0, timeout_s=WAIT_S)
            return 0

        jax.lax.fori_loop(0, 50, turn, 0)

    @dflow.jit
    def ask() -> Any:
        def turn(i: Any, wrong: Any) -> Any:
            asked.enqueue(i.astype(jnp.float32), timeout_s=WAIT_S)
            told.dequeue(timeout_s=WAIT_S)
            seen.assign(shared.read())
            return wrong + (seen.read() != i)

        return jax.lax.fori_loop(0, 50, turn, 0)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(write)
        assert int(ask()) == 0
        running.result(WAIT_S)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dflow.FIFOQueue(0, F32, name="q"), "queue 'q' cannot have the capacity 0"),
        (lambda: dflow.FIFOQueue(1, (), name="q"), "queue 'q' would hold elements without arrays"),
        (lambda: dflow.FIFOQueue(1, str, name="q"), r"give strings as jax\.ShapeDtypeStruct\(\(\), numpy\.str_\)"),
        (lambda: dflow.FIFOQueue(1, 3.0, name="q"), r"has 3\.0 for a component[\s\S]*give each one as jax\.Shape"),
        (lambda: dflow.FIFOQueue(1, jax.eval_shape(lambda: jax.random.key(0))), "enqueue jax.random.key_data"),
        (dflow.jit(lambda: dflow.FIFOQueue(1, F32, name="q").size()), "is created inside traced code"),
        (lambda: numbers().dequeue_many(-1), r"was asked for -1 elements[\s\S]*give how many to take, from 0"),
        (lambda: dflow.jit(numbers().dequeue_many)(3), "how many must be a number that is known"),
    ],
)
def test_what_makes_no_queue_is_refused(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(QueueError, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"x": 1.0},
            r"queue 'pair' holds \(f32\[\], i32\[\]\) but enqueue was given {'x': f32\[\]}\n  at .*test_queues",
        ),
        ((1.0, 2.5), r"but enqueue was given \(f32\[\], f32\[\]\)"),
        ((np.array(3), 1), r"but enqueue was given \(i64\[\], i32\[\]\)"),
        (
            (jnp.ones(2), 1),
            r"but enqueue was given \(f32\[2\], i32\[\]\)[\s\S]*give it the structure, shapes and dtypes",
        ),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_element_of_another_type_is_refused(given: Any, message: str, compiled: bool) -> None:
    queue = dflow.FIFOQueue(2, (F32, I32), name="pair")
    enqueue = dflow.jit(lambda: queue.enqueue(given)) if compiled else lambda: queue.enqueue(given)
    with pytest.raises(QueueTypeError, match=message):
        enqueue()
    with pytest.raises(QueueTypeError, match="with one dimension more in front, the same for all"):
        queue.enqueue_many((jnp.ones(2), jnp.zeros(3, jnp.int32)))


def test_an_interrupt_takes_the_wait_along(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = numbers(name="empty")

    @dflow.jit
    def step() -> Any:
        return jax.lax.scan(lambda c, _: (c + empty.dequeue(), None), 0.0, None, length=2)[0]

    class Interrupted(SimpleQueue[Any]):
        def get(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(local_step, "SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
    empty.enqueue(1.0)
    assert drained(empty) == [1]


def test_what_jax_would_do_to_a_queue_op_is_refused() -> None:
    queue = numbers(1, 2)
    with pytest.raises(QueueError, match=r"queue 'q' is used under vmap[\s\S]*use enqueue_many or dequeue_many"):
        jax.vmap(queue.enqueue)(jnp.ones(3))
    with pytest.raises(QueueError, match="queue 'q' is used under vmap"):
        dflow.jit(jax.vmap(lambda x: x + queue.dequeue()))(jnp.ones(3))
    nested = [jax.jit(queue.enqueue), lambda x: jax.lax.cond(x > 0, queue.dequeue, lambda: x)]
    nested.append(lambda x: jax.lax.scan(lambda c, _: (c + queue.dequeue(), None), x, None, length=2)[0])
    for function in nested:
        with pytest.raises(QueueError, match=r"queue 'q' is used under vmap[\s\S]*test_queues\.py"):
            dflow.jit(jax.vmap(function))(jnp.ones(3))
    with pytest.raises(QueueError, match=r"depends on what jax.grad differentiates[\s\S]*use dflow.grad"):
        jax.grad(lambda x: (queue.enqueue(x), x)[1])(1.0)
    with pytest.raises(PlainJitError, match="queue 'q' is used in a function that JAX compiles without dflow"):
        jax.jit(queue.dequeue)()

    def loss(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + x * queue.dequeue(), None), 0.0, None, length=2)[0]

    for grad in (jax.grad, dflow.grad):
        with pytest.raises(QueueError, match=r"inside a loop that is differentiated[\s\S]*dequeue before the loop"):
            dflow.jit(grad(loss))(1.0)
    assert drained(queue) == [1, 2]


def test_a_step_that_fails_takes_its_other_waits_along() -> None:
    empty, closed = numbers(name="empty"), numbers(name="closed")
    closed.close()

    @dflow.jit
    def step() -> Any:
        return jax.lax.scan(lambda c, _: (c + empty.dequeue(), None), 0.0, None, length=2)[0], closed.dequeue()

    with pytest.raises(
        dflow.QueueClosed, match=r"queue 'closed' is closed and cannot give 1 element[\s\S]*test_queues.py"
    ):
        step()
    empty.enqueue(1.0)
    assert drained(empty) == [1]


def test_a_wait_in_a_loop_has_a_deadline_and_the_users_line() -> None:
    queue = numbers(1)
    step = dflow.jit(lambda: jax.lax.fori_loop(0, 3, lambda _, c: c + queue.dequeue(timeout_s=0.01), 0.0))
    with pytest.raises(
        dflow.DeadlineExceeded, match=r"'q' could not give 1 element within 0\.01 s[\s\S]*test_queues\.py"
    ):
        step()


def test_an_interpreted_wait_is_an_error() -> None:
    queue = numbers()
    graph = dflow.graph(queue.dequeue).graph
    with pytest.raises(dflow.DeadlineExceeded, match=r"node %q_1 \(queue\.dequeue\): a dequeue of 1 waits for ever"):
        interpret(graph, [], {"q": QueueModel(queue.settings)})
    with pytest.raises(dflow.QueueClosed, match="a dequeue of 1 on a closed queue"):
        interpret(graph, [], {"q": QueueModel(queue.settings, is_closed=True)})


def test_an_error_in_a_step_names_the_op_and_the_loops_around_it() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.int32), name="short")
    queue.enqueue(1)
    queue.close()

    @dflow.jit
    def fails(n: jax.Array) -> jax.Array:
        def turn(total: jax.Array) -> jax.Array:
            return jax.lax.cond(total >= 0, lambda: total + queue.dequeue(), lambda: total)

        return jax.lax.while_loop(lambda total: total < n, turn, 0)

    with pytest.raises(dflow.QueueClosed) as raised:
        fails(9)
    notes = raised.value.__notes__  # without JAX's on its frames
    assert [note.split("\n")[0].split(" (")[1] for note in notes] == ["queue.dequeue)", "ctrl.cond)", "ctrl.while)"]
    assert all("test_queues.py:" in note for note in notes)


def test_an_error_of_a_callback_in_a_step_that_waits_names_the_call() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.int32), name="one")
    queue.enqueue(1)

    def broken(x: Any) -> Any:
        raise ZeroDivisionError("no")

    @dflow.jit
    def fails() -> jax.Array:
        return jax.pure_callback(broken, jax.ShapeDtypeStruct((), jnp.int32), queue.dequeue()) + 1

    with pytest.raises(Exception, match="ZeroDivisionError"):
        fails().block_until_ready()
