"""Errors of queues: refused elements and transforms, deadlines, interrupts, and failed steps."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.lowering.steps import local_step
from dflow.tracing.errors import PlainJitError, QueueError, QueueTypeError
from tests.dflow.number_queues import F32, I32, drained, numbers
from tests.reference.interpret import interpret
from tests.reference.queue_model import QueueModel


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dflow.FIFOQueue(0, F32, name="q"), "queue 'q' cannot have the capacity 0"),
        (lambda: dflow.FIFOQueue(1, (), name="q"), "queue 'q' would hold elements without arrays"),
        (
            lambda: dflow.FIFOQueue(1, 3.0, name="q"),
            r"has 3\.0 for a component[\s\S]*give each one as jax\.ShapeDtypeStr",
        ),
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
            r"queue 'pair' holds \(f32\[\], i32\[\]\) but enqueue was given {'x': f32\[\]}\n  at .*test_queue_errors",
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
        with pytest.raises(QueueError, match=r"queue 'q' is used under vmap[\s\S]*test_queue_errors\.py"):
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
        dflow.QueueClosed, match=r"queue 'closed' is closed and cannot give 1 element[\s\S]*test_queue_errors.py"
    ):
        step()
    empty.enqueue(1.0)
    assert drained(empty) == [1]


def test_a_wait_in_a_loop_has_a_deadline_and_the_users_line() -> None:
    queue = numbers(1)
    step = dflow.jit(lambda: jax.lax.fori_loop(0, 3, lambda _, c: c + queue.dequeue(timeout_s=0.01), 0.0))
    with pytest.raises(
        dflow.DeadlineExceeded, match=r"'q' could not give 1 element within 0\.01 s[\s\S]*test_queue_errors\.py"
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
    assert all("test_queue_errors.py:" in note for note in notes)


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
