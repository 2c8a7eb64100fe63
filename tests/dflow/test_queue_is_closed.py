"""`Queue.is_closed`: eagerly, in traced code and in the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.tracing.errors import QueueError, VerifyError
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.syntax.text import parse
from dflow.tracing.syntax.verify import verify
from tests.reference.interpret import interpret
from tests.reference.queue_model import QueueModel

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)

CLOSE = """graph(%q: queue<i32[]>) {
 !%before: bool[] = queue.is_closed(%q)
 !%1: token = queue.close(%q)
 !%after: bool[] = queue.is_closed(%q)
  return %before, %after
}"""


def test_a_queue_is_closed_from_its_close_on() -> None:
    queue = dflow.FIFOQueue(2, NUMBER)
    queue.enqueue(1)
    assert not queue.is_closed()
    queue.close()
    assert queue.is_closed()
    assert int(queue.dequeue()) == 1
    assert queue.is_closed().dtype == jnp.bool_


def test_a_traced_loop_ends_when_the_queue_is_closed_and_empty() -> None:
    queue = dflow.FIFOQueue(8, NUMBER)

    @dflow.jit
    def total() -> jax.Array:
        def goes_on(carry: jax.Array) -> jax.Array:
            return ~(queue.is_closed() & (queue.size() == 0))

        return jax.lax.while_loop(goes_on, lambda carry: carry + queue.dequeue(), jnp.int32(0))

    queue.enqueue_many(jnp.arange(1, 5, dtype=jnp.int32))
    queue.close()
    assert int(total()) == 10


def test_the_interpreter_and_a_compiled_function_see_a_close_in_the_order_of_the_program() -> None:
    queue = dflow.FIFOQueue(1, NUMBER)

    @dflow.jit
    def closed() -> tuple[jax.Array, jax.Array]:
        before = queue.is_closed()
        queue.close()
        return before, queue.is_closed()

    results, after = interpret(parse(CLOSE), [], {"q": QueueModel(QueueSettings(QueueKind.FIFO, 1))})
    assert [bool(result) for result in results] == [bool(result) for result in closed()] == [False, True]
    assert after["q"].is_closed


def test_of_a_variable_it_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"queue.is_closed: the first operand is ref<i32\[\]>, not a queue"):
        verify(parse("graph(%v: ref<i32[]>) {\n !%1: bool[] = queue.is_closed(%v)\n  return %1\n}"))


def test_of_a_queue_that_is_gone_it_raises() -> None:
    with dflow.container("gone"):
        queue = dflow.FIFOQueue(1, NUMBER)
    dflow.reset_container("gone")
    with pytest.raises(QueueError, match="gone"):
        queue.is_closed()
