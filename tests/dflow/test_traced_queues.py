"""Queue ops in traced code: in program order in loops, branches and nested functions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from tests.dflow.number_queues import F32, WAIT_S, drained, numbers


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
