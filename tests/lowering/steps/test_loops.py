"""Loops that wait, with several concurrent iterations. A test plays the other end of each queue, and sees the waits."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.pending_operations import Cancel, OnResults
from dflow.lowering.state.store import Store
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.local_step import fetched, lower_programs
from dflow.lowering.steps.lowered import make_plans
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import QueueClosed
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import RefType
from dflow.tracing.syntax.parse import parse
from tests.effort import examples
from tests.lowering.one_process import Mail, Mailbox

STEP = StepId(ALONE, 1)


class Played:
    """A queue whose other end is the test: ops wait until `answer`, except enqueues."""

    def __init__(self) -> None:
        self.waiting: deque[OnResults] = deque()
        self.put: list[int] = []
        self.cancelled: list[BaseException] = []
        self.asked = threading.Semaphore(0)

    def start(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        if op.name == "queue.enqueue":
            self.put.append(int(operands[0]))
            on_results(())
        else:
            self.waiting.append(on_results)
            self.asked.release()
        return self.cancelled.append

    def forget(self, reason: str, remedy: str) -> None:
        raise NotImplementedError

    def answer(self, number: int) -> None:
        """Give a number to the op that waits longest."""
        self.waiting.popleft()((jnp.int32(number),))


class Run:
    """A run of a graph over such queues."""

    def __init__(self, text: str, *inputs: int, pool: ThreadPoolExecutor | None = None, **variables: int) -> None:
        graph = run_passes(parse(text), pipeline(), check=True)
        self.queues = {ref.name: Played() for ref in graph.refs if not isinstance(ref.type, RefType)}
        self.outcomes: list[Outcome[Any]] = []
        self.work: deque[Callable[[], None]] = deque()
        self.ended = threading.Event()
        self.store = Store()
        for ref in graph.refs:
            if isinstance(ref.type, RefType):
                self.store.create(ref.name, ref.type.of, lambda name=ref.name: jnp.int32(variables[name]))
            else:
                self.store.resources[ref.name] = self.queues[ref.name]
        part = make_plans(graph, ALONE, {ref: ref.name for ref in graph.refs})[ALONE]
        self.plan = part.plan
        programs = [program.compile() for program in lower_programs(part, self.store)]
        feeds = [jnp.int32(number) for number in inputs]
        submit = pool.submit if pool else self.work.append
        run_of(
            Executable(part.plan, programs), self.store, Mailbox(Mail(), ALONE).channel, STEP, feeds, self.end, submit
        ).start()
        self.go_on()

    def end(self, outcome: Outcome[Any]) -> None:
        self.outcomes.append(outcome)
        self.ended.set()

    def go_on(self) -> None:
        """Do all submitted work."""
        while self.work:
            self.work.popleft()()

    def answer(self, queue: str, number: int) -> None:
        """Answer the op that waits longest for a queue, and do the work that follows."""
        self.queues[queue].answer(number)
        self.go_on()

    def answer_all(self, queue: str, count: int) -> None:
        """Give the numbers below `count` to a queue, each as soon as an op waits for it."""
        for number in range(count):
            played = self.queues[queue]
            assert played.asked.acquire(timeout=300), f"nobody waits for {queue!r} a {number}th time"
            played.answer(number)

    def waits(self, queue: str) -> int:
        """Number of ops that wait for a queue."""
        return len(self.queues[queue].waiting)


def scan(body: str, length: int, parallel: int | None = None, start: str = "0:i32[]") -> str:
    """A scan over queues `a`, `b`, `out` and a variable `w`, with one carried number and one stacked number."""
    options = f"carry=1, length={length}, reverse=False, rows=0"
    options += "" if parallel is None else f", parallel={parallel}"
    return f"""
graph(%w: ref<i32[]>, %a: queue<i32[]>, %b: queue<i32[]>, %out: queue<i32[]>) {{
 !%last: i32[], %all: i32[{length}] = ctrl.scan(%w, %a, %b, %out, {start}) {{{options}}} {{
    graph(%w: ref<i32[]>, %a: queue<i32[]>, %b: queue<i32[]>, %out: queue<i32[]>, %c: i32[]) {{
{body}
    }}
  }}
  return %last, %all
}}"""


TWO_QUEUES = """
     !%x: i32[] = queue.dequeue(%a)
     !%y: i32[] = queue.dequeue(%b)
      %z: i32[] = jax.add(%x, %y)
      %d: i32[] = jax.add(%z, %c)
     !%e: token = queue.enqueue(%out, %z)
      return %d, %z"""


def test_a_turn_dequeues_while_the_turns_before_still_wait_for_something_else() -> None:
    run = Run(scan(TWO_QUEUES, 3), w=0)
    for number in range(3):
        assert run.waits("a") == 1  # each queue's ops in program order
        run.answer("a", number)
    assert (run.waits("a"), run.waits("b")) == (0, 1)
    assert run.queues["out"].put == []
    for number in (10, 20, 30):
        run.answer("b", number)
    assert run.queues["out"].put == [10, 21, 32]
    last, stacked = fetched(run.outcomes[0])
    assert (last, stacked.tolist()) == (63, [10, 21, 32])


@pytest.mark.parametrize(("parallel", "most"), [(None, 10), (1, 1), (2, 2)])
def test_no_more_turns_are_under_way_than_the_loop_says_or_ten(parallel: int | None, most: int) -> None:
    run, taken = Run(scan(TWO_QUEUES, 12, parallel), w=0), 0
    while run.waits("a"):
        run.answer("a", taken)
        taken += 1
    assert taken == most
    run.answer("b", 0)
    assert run.waits("a") == 1


def test_a_value_that_is_handed_through_comes_at_once() -> None:
    run = Run(
        """
graph(%a: queue<i32[]>, %out: queue<i32[]>, %n: i32[]) {
 !%1: i32[], %2: i32[] = ctrl.scan(%a, %out, %n, 3:i32[]) {carry=2, length=3, reverse=False, rows=0} {
    graph(%a: queue<i32[]>, %out: queue<i32[]>, %c: i32[], %d: i32[]) {
     !%x: i32[] = queue.dequeue(%a)
     !%e: token = queue.enqueue(%out, %d)
      return %d, %d
    }
  }
  return %1, %2
}""",
        9,
    )
    assert run.queues["out"].put == [3, 3, 3]
    for _ in range(3):
        run.answer("a", 0)
    assert fetched(run.outcomes[0]) == (3, 3)


WHILE = """
graph(%w: ref<i32[]>, %a: queue<i32[]>, %b: queue<i32[]>, %n: i32[]) {
 !%i: i32[], %sum: i32[] = ctrl.while(%w, %a, %b, %n, 0:i32[], 0:i32[]) {carry=2} {
    graph(%w: ref<i32[]>, %a: queue<i32[]>, %b: queue<i32[]>, %n: i32[], %c: i32[], %s: i32[]) {
      TEST
    }
    graph(%w: ref<i32[]>, %a: queue<i32[]>, %b: queue<i32[]>, %n: i32[], %c: i32[], %s: i32[]) {
      %c_1: i32[] = jax.add(%c, 1:i32[])
     !%x: i32[] = queue.dequeue(%a)
     !%y: i32[] = queue.dequeue(%b)
      %z: i32[] = jax.add(%x, %y)
      %t: i32[] = jax.add(%z, %s)
     !%done: token = var.assign(%w, %t)
      return %c_1, %t
    }
  }
  return %i, %sum
}"""
COUNTED = WHILE.replace("TEST", "%1: bool[] = jax.lt(%c, %n)\n      return %1")
BY_STATE = WHILE.replace("TEST", "!%v: i32[] = var.read(%w)\n      %1: bool[] = jax.lt(%v, %n)\n      return %1")


def test_a_while_goes_ahead_as_far_as_its_test_is_known() -> None:
    run = Run(COUNTED, 3, w=0)
    for number in range(3):
        run.answer("a", number)
    assert (run.waits("a"), run.waits("b")) == (0, 1)
    for number in (10, 20, 30):
        assert not run.outcomes
        run.answer("b", number)
    assert fetched(run.outcomes[0]) == (3, 63)
    assert run.store.read("w") == 63


def test_a_test_of_state_that_the_body_changes_waits_for_the_turn_before() -> None:
    run = Run(BY_STATE, 25, w=0)
    run.answer("a", 1)
    assert run.waits("a") == 0
    run.answer("b", 10)
    assert run.waits("a") == 1
    run.answer("a", 4)
    run.answer("b", 20)
    assert fetched(run.outcomes[0]) == (2, 35)


def test_a_loop_without_turns_gives_what_it_started_with() -> None:
    assert fetched(Run(COUNTED, 0, w=0).outcomes[0]) == (0, 0)
    last, stacked = fetched(Run(scan(TWO_QUEUES, 0), w=0).outcomes[0])
    assert (last, stacked.shape) == (0, (0,))


def test_an_error_in_one_turn_ends_all_that_wait_and_is_told_once() -> None:
    run, error = Run(scan(TWO_QUEUES, 3), w=0), QueueClosed("closed")
    run.answer("a", 1)
    assert (run.waits("a"), run.waits("b")) == (1, 1)
    run.queues["b"].waiting.popleft()(error)
    run.go_on()
    assert run.outcomes == [error]
    assert run.queues["a"].cancelled == [error, error]  # one was answered earlier, as its queue knows
    run.answer("a", 2)
    assert run.outcomes == [error]
    assert run.queues["out"].put == []


def test_many_turns_need_no_stack() -> None:
    run = Run(scan("     !%e: token = queue.enqueue(%out, %c)\n      return %c, %c", 3000, start="7:i32[]"), w=0)
    assert fetched(run.outcomes[0])[0] == 7
    assert run.queues["out"].put == [7] * 3000


def programs() -> Iterator[str]:
    yield TWO_QUEUES
    yield """
     !%v: i32[] = var.read(%w)
     !%x: i32[] = queue.dequeue(%a)
      %n: i32[] = jax.add(%v, %x)
     !%s: token = var.assign(%w, %n)
     !%y: i32[] = queue.dequeue(%b)
      %d: i32[] = jax.mul(%c, %y)
     !%t: token = var.assign_add(%w, %d)
     !%e: token = queue.enqueue(%out, %n)
      return %x, %d"""
    yield """
     !%x: i32[] = queue.dequeue(%a)
     !%s: token = var.assign_add(%w, %x)
     !%k: i32[] = ctrl.scan(%w, %b, %c) {carry=1, length=2, reverse=False, rows=0} {
        graph(%w: ref<i32[]>, %b: queue<i32[]>, %c: i32[]) {
         !%y: i32[] = queue.dequeue(%b)
         !%v: i32[] = var.read(%w)
          %z: i32[] = jax.add(%y, %v)
          return %z
        }
      }
     !%e: token = queue.enqueue(%out, %k)
      return %k, %x"""


@settings(max_examples=examples(30))
@given(data=st.data(), body=st.sampled_from([*programs()]), length=st.integers(0, 4))
def test_whatever_comes_first_all_ends_as_turn_by_turn(data: st.DataObject, body: str, length: int) -> None:
    ends = []
    for parallel in (1, data.draw(st.integers(2, 5))):
        run, came = Run(scan(body, length, parallel, "1:i32[]"), w=5), {"a": 0, "b": 0}
        while not run.outcomes:
            name = data.draw(st.sampled_from([name for name in "ab" if run.waits(name)]))
            came[name] += 1
            run.answer(name, 3 * came[name] + ord(name))
        results = [np.asarray(value).tolist() for value in fetched(run.outcomes[0])]
        ends.append((results, run.queues["out"].put, int(run.store.read("w")), came))
    assert ends[0] == ends[1]


def test_turns_that_many_threads_work_on_end_once_and_in_order() -> None:
    body = """
     !%x: i32[] = queue.dequeue(%a)
     !%y: i32[] = queue.dequeue(%b)
      %z: i32[] = jax.mul(%x, %y)
     !%s: token = var.assign_add(%w, %z)
     !%v: i32[] = var.read(%w)
      %d: i32[] = jax.add(%z, %c)
     !%e: token = queue.enqueue(%out, %d)
      return %d, %v"""
    length = 12
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(2) as others:
        for seed in range(5):
            run = Run(scan(body, length, 4), pool=pool, w=0)
            answered = [others.submit(run.answer_all, name, length) for name in "ab"]
            for each in answered:
                each.result(300)
            assert run.ended.wait(300)
            last, stacked = fetched(run.outcomes[0])
            sums = [sum(number * number for number in range(turn + 1)) for turn in range(length)]
            assert (last, stacked.tolist(), run.queues["out"].put) == (sums[-1], sums, sums), seed
            assert len(run.outcomes) == 1


def test_effects_that_nobody_told_us_of_come_in_the_order_of_the_turns() -> None:
    turn = """
     !%x: i32[] = queue.dequeue(%a)
     !%n: i32[] = jax.neg(%x)
     !%y: i32[] = queue.dequeue(%b)
      return %y, %n"""
    run = Run(scan(turn, 2), w=0)
    body = Executable(run.plan.bodies[0])
    names = [name.split(" ")[0] for name in body.plan.names]
    follows = {names[index]: {names[other] for other in before} for index, before in body.follows.items()}
    # An op that waits for a queue may see effects outside the graph, so it keeps its order with them.
    assert follows == {"%x": {"%x", "%n"}, "%n": {"%n", "%y"}, "%y": {"%y"}}


# By the public API.


def test_a_scope_says_how_many_turns_are_under_way_at_once() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.int32))

    @dflow.jit
    def total(n: jax.Array) -> jax.Array:
        with dflow.parallel_iterations(3):
            first = jax.lax.fori_loop(0, n, lambda i, t: t + queue.dequeue(), 0)
            with dflow.parallel_iterations(1):
                return jax.lax.scan(lambda t, _: (t + queue.dequeue(), None), first, None, length=1)[0]

    graph: Graph = dflow.graph(total, 1).graph
    assert [node.attributes["parallel"] for node in graph.nodes if node.bodies] == [3, 1]
    queue.enqueue_many(jnp.array([4, 5]))
    assert total(1) == 9


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_turns_is_a_positive_integer(count: Any) -> None:
    with (
        pytest.raises(dflow.GraphTypeError, match=f"expected a positive integer, got {re.escape(repr(count))}\n"),
        dflow.parallel_iterations(count),
    ):
        pass
