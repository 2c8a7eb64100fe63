"""Many threads run steps over the same variables and queues: no step reads half an update, and no update is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow

THREADS = 32
WAIT_S = 300.0
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def all_at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run each callable on its own thread, started together, and return the results. Raises the first error."""
    ready = Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        ready.wait(WAIT_S)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
        return [future.result(WAIT_S) for future in futures]


class Model:
    """Two variables that every step changes by the same amount; each step returns the difference that it read."""

    def __init__(self) -> None:
        self.one = dflow.Variable(jnp.zeros(16, jnp.int32), name="one")
        self.other = dflow.Variable(jnp.zeros(16, jnp.int32), name="other")
        self.steps = dflow.Variable(jnp.int32(0), name="steps")
        self.inputs = dflow.FIFOQueue(4, NUMBER, name="inputs")
        self.train = dflow.jit(self._train)
        self.evaluate = dflow.jit(lambda: (self.one.read(), self.other.read(), self.steps.read()))
        self.put = dflow.jit(lambda x: self.inputs.enqueue(x, timeout_s=WAIT_S))
        self.train_from_queue = dflow.jit(lambda: self._train(self.inputs.dequeue(timeout_s=WAIT_S)))
        self.train_three = dflow.jit(
            lambda: jax.lax.fori_loop(
                0, 3, lambda _, apart: apart | self._train(self.inputs.dequeue(timeout_s=WAIT_S)), False
            )
        )
        self.double = dflow.jit(self._double)

    def _train(self, x: Any) -> Any:
        apart = (self.one.read() != self.other.read()).any()
        self.one.assign_add(jnp.full(16, x))
        self.other.assign(self.other.read() + x)
        self.steps.assign_add(1)
        return apart

    def _double(self) -> Any:
        apart = (self.one.read() != self.other.read()).any()
        self.one.assign(self.one.read() * 1)
        self.other.assign(self.one.read())
        return apart


def repeat(count: int, work: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: [work() for _ in range(count)]


@pytest.mark.device
@pytest.mark.parametrize("times", [6])
def test_training_input_evaluation_and_checkpoints_at_once(times: int) -> None:
    model = Model()
    trainers = [repeat(times, lambda: model.train(1))] * 8
    feeders = [repeat(times, lambda: model.put(2))] * 8
    from_queue = [repeat(times, model.train_from_queue)] * 5
    from_queue_in_loops = [repeat(times // 3, model.train_three)] * 3
    writers = [repeat(times, model.double)] * 2
    readers = [repeat(times, model.evaluate)] * 6
    assert len([*trainers, *feeders, *from_queue, *from_queue_in_loops, *writers, *readers]) == THREADS
    results = all_at_once(*trainers, *feeders, *from_queue, *from_queue_in_loops, *writers, *readers)
    reads = [read for by_thread in results[-6:] for read in by_thread]
    told = [apart for by_thread in (*results[:8], *results[16:26]) for apart in by_thread]
    assert not np.array(told).any()
    # Arrays that were read during training still have the values of the read, after later writes.
    for one, other, steps in reads:
        assert one.tolist() == other.tolist() == [one[0].item()] * 16
        assert steps <= one[0] <= 2 * steps
    for by_thread in results[-6:]:
        counted = [int(steps) for _, _, steps in by_thread]
        assert counted == sorted(counted)
    one, other, steps = model.evaluate()
    assert steps == 16 * times
    assert one.tolist() == other.tolist() == [8 * times + 2 * 8 * times] * 16
    assert model.inputs.size() == 0


def test_a_step_that_fails_takes_nothing_from_those_that_run_beside_it() -> None:
    model = Model()
    empty = dflow.FIFOQueue(1, NUMBER, name="empty")

    @dflow.jit
    def fails() -> jax.Array:
        before = model.steps.read()
        return before + empty.dequeue(timeout_s=0.01)

    def failing() -> int:
        with pytest.raises(dflow.DeadlineExceeded, match=r"queue 'empty' could not give 1 element within 0\.01 s"):
            fails()
        return 1

    works = [repeat(4, failing), repeat(4, lambda: model.train(1))] * (THREADS // 2)
    all_at_once(*works)
    one, other, steps = model.evaluate()
    assert one.tolist() == other.tolist() == [4 * THREADS // 2] * 16
    assert steps == 4 * THREADS // 2
