"""Hypothesis generator of programs over variables, queues and an accumulator that end when run by one thread.

The programs of one thread must not wait for ever, so what they do to a queue keeps within what it holds: the generator
runs along, with the number of elements in each queue and of gradients, and closes nothing. A body leaves as many of
each as it found, since a loop may turn any number of times. All numbers are int32, which wraps the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dflow.tracing.accumulators import ConditionalAccumulator
from dflow.tracing.queue_settings import QueueKind
from dflow.tracing.queues import FIFOQueue, PriorityQueue, Queue, RandomShuffleQueue
from dflow.tracing.resources import Variable
from dflow.tracing.row_gradient import RowGradient

CAPACITY = 4
#: How many elements each queue holds when a program starts, and how many it holds back.
FULL, HELD_BACK = 2, 1
SPEC = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32))

__all__ = ["EAGER", "TRACED", "QueueProgram", "queue_programs", "queues_of", "run", "variables_of"]


@dataclass(frozen=True)
class Control:
    """How control flow is done: the signatures are JAX's."""

    scan: Callable[..., Any]
    while_loop: Callable[..., Any]
    switch: Callable[..., Any]
    jit: Callable[..., Any]


def _python_scan(step: Callable[..., Any], carry: Any, xs: Any, *, reverse: bool) -> Any:
    ys: list[Any] = []
    for x in xs[::-1] if reverse else xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, jnp.stack(ys)


def _python_while(test: Callable[..., Any], step: Callable[..., Any], carry: Any) -> Any:
    while test(carry):
        carry = step(carry)
    return carry


TRACED = Control(jax.lax.scan, jax.lax.while_loop, jax.lax.switch, jax.jit)
EAGER = Control(_python_scan, _python_while, lambda index, branches: branches[int(index)](), lambda fn: fn)


@dataclass(frozen=True)
class Put:
    """Enqueue `count` elements made of a value; one by one, or at once."""

    queue: int
    value: int
    count: int
    at_once: bool


@dataclass(frozen=True)
class Take:
    """Dequeue `count` elements and push their sum; one by one, at once, or up to as many."""

    queue: int
    count: int
    how: str


@dataclass(frozen=True)
class Size:
    """Push a queue's size."""

    queue: int


@dataclass(frozen=True)
class Touch:
    """Assign a value to a variable, add it, or push what the variable holds."""

    variable: int
    value: int
    how: str


@dataclass(frozen=True)
class Sum:
    """Push a combination of two values."""

    left: int
    right: int


@dataclass(frozen=True)
class Nested:
    """Run bodies by control flow and push what they give."""

    how: str
    value: int
    turns: int
    bodies: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Apply:
    """Apply gradients made of a value, fresh or of an earlier step, and push how many were fresh."""

    value: int
    count: int
    age: int


@dataclass(frozen=True)
class TakeSum:
    """Take the sum of so many gradients or more, and push a number made of it."""

    count: int


@dataclass(frozen=True)
class Ask:
    """Push a number that the accumulator knows, or set its step on."""

    what: str


Step = Put | Take | Size | Touch | Sum | Nested | Apply | TakeSum | Ask


@dataclass(frozen=True)
class QueueProgram:
    """A function of an int32 scalar over `kinds` queues and two variables, that may be called so many `times`."""

    kinds: tuple[QueueKind, ...]
    steps: tuple[Step, ...]
    times: int

    def __call__(self, variables: Sequence[Variable], queues: Sequence[Any], x: Any, control: Control) -> Any:
        """The last three values."""
        return tuple(run(self.steps, [jnp.asarray(x, jnp.int32)], variables, queues, control)[-3:])


def run(
    steps: Sequence[Step],
    stack: Sequence[Any],
    variables: Sequence[Variable],
    queues: Sequence[Any],
    control: Control,
) -> list[Any]:
    """Run the steps on a stack of int32 scalars; the stack after them. The last of `queues` is the accumulator."""
    stack = list(stack)
    for step in steps:
        match step:
            case Put():
                _put(step, stack[step.value % len(stack)], queues[step.queue])
            case Take():
                stack.append(_taken(step, queues[step.queue]))
            case Size(queue):
                stack.append(queues[queue].size())
            case Touch(variable, value, "read"):
                stack.append(variables[variable].read())
            case Touch(variable, value, how):
                getattr(variables[variable], how)(stack[value % len(stack)])
            case Sum(left, right):
                stack.append(stack[left % len(stack)] * 3 - stack[right % len(stack)])
            case Apply(value, count, age):
                gradients = [_gradient(stack[value % len(stack)] + index) for index in range(count)]
                fresh = [queues[-1].apply(gradient, queues[-1].step - age) for gradient in gradients]
                stack.append(sum((jnp.asarray(one, jnp.int32) for one in fresh), jnp.int32(0)))
            case TakeSum(count):
                dense, rows = queues[-1].take(count)
                stack.append(dense.sum(dtype=jnp.int32) + _weighed(rows.indices) + _weighed(rows.rows[:, 0]))
            case Ask("set_step"):
                queues[-1].set_step(queues[-1].step + 1)
            case Ask("step"):
                stack.append(queues[-1].step)
            case Ask(what):
                stack.append(getattr(queues[-1], what)())
            case Nested():
                stack.append(_nested(step, stack, variables, queues, control))
    return stack


def _put(step: Put, value: Any, queue: Queue) -> None:
    numbers = [value + index for index in range(step.count)]
    if step.at_once and numbers:
        queue.enqueue_many((jnp.stack(numbers), jnp.stack([jnp.stack([n, n * 2]) for n in numbers])))
        return
    for number in numbers:
        queue.enqueue((number, jnp.stack([number, number * 2])))


def _gradient(value: Any) -> tuple[Any, RowGradient]:
    """A dense part and a row-sparse one, whose rows and indices depend on the value."""
    indices = jnp.stack([value % 3, (value + 1) % 3])
    return jnp.stack([value, value * 2]), RowGradient(indices, jnp.stack([value, value + 1])[:, None], (5, 1))


def _taken(step: Take, queue: Queue) -> Any:
    if step.how == "one by one" or not step.count:
        elements = [queue.dequeue() for _ in range(step.count)]
        return sum((first + second.sum(dtype=jnp.int32) for first, second in elements), jnp.int32(0))
    if step.how == "at once":
        first, second = queue.dequeue_many(step.count)
        return _weighed(first) + _weighed(second[:, 1])
    (first, second), count = queue.dequeue_up_to(step.count)
    return _weighed(first) + _weighed(second[:, 1]) + count


def _weighed(values: Any) -> Any:
    """A sum that tells the order."""
    return (values * jnp.arange(1, len(values) + 1, dtype=jnp.int32)).sum(dtype=jnp.int32)


def _nested(
    step: Nested, stack: list[Any], variables: Sequence[Variable], queues: Sequence[Any], control: Control
) -> Any:
    def body(number: int, *more: Any) -> Any:
        return run(step.bodies[number], [*stack, *more], variables, queues, control)[-1]

    start = stack[step.value % len(stack)]
    match step.how:
        case "cond":
            branches = [lambda number=number: body(number) for number in range(len(step.bodies))]
            return control.switch(start % len(branches), branches)
        case "scan":
            xs = start + jnp.arange(step.turns, dtype=jnp.int32)
            last, ys = control.scan(lambda c, x: (body(0, c, x), c - x), start, xs, reverse=step.value % 2 == 0)
            return last + ys.sum(0, dtype=jnp.int32)
        case "while":
            turns = (jnp.int32(0), start)
            return control.while_loop(lambda c: c[0] < step.turns, lambda c: (c[0] + 1, body(0, c[1])), turns)[1]
    return control.jit(lambda x: body(0, x))(start)


@dataclass
class _Levels:
    """How many elements each queue holds, as a program is drawn."""

    kinds: tuple[QueueKind, ...]
    held: list[int] = field(default_factory=list)
    gradients: int = 0

    def can_take(self, queue: int) -> int:
        back = HELD_BACK if self.kinds[queue] is QueueKind.SHUFFLE else 0
        return max(0, self.held[queue] - back)


@st.composite
def _steps(draw: st.DrawFn, levels: _Levels, depth: int) -> tuple[Step, ...]:
    return tuple(draw(_step(levels, depth)) for _ in range(draw(st.integers(1, 4))))


@st.composite
def _step(draw: st.DrawFn, levels: _Levels, depth: int) -> Step:
    index = st.integers(0, 7)
    queue = draw(st.integers(0, len(levels.kinds) - 1))
    kinds = ["put", "take", "put", "take", "size", "touch", "sum", "apply", "take sum", "ask"]
    match draw(st.sampled_from([*kinds, *["nested"] * 4 * (depth > 0)])):
        case "apply":
            count, age = draw(st.integers(0, 2)), draw(st.integers(-1, 1))
            levels.gradients += count if age <= 0 else 0
            return Apply(draw(index), count, age)
        case "take sum" if levels.gradients:
            wanted = draw(st.integers(1, levels.gradients))
            levels.gradients = 0
            return TakeSum(wanted)
        case "take sum" | "ask":
            return Ask(draw(st.sampled_from(["step", "count", "dropped", "set_step"])))
        case "put":
            count = draw(st.integers(0, min(2, CAPACITY - levels.held[queue])))
            levels.held[queue] += count
            return Put(queue, draw(index), count, draw(st.booleans()))
        case "take":
            count = draw(st.integers(0, min(2, levels.can_take(queue))))
            levels.held[queue] -= count
            return Take(queue, count, draw(st.sampled_from(["one by one", "at once", "up to"])))
        case "size":
            return Size(queue)
        case "touch":
            how = draw(st.sampled_from(["read", "assign", "assign_add"]))
            return Touch(draw(st.integers(0, 1)), draw(index), how)
        case "sum":
            return Sum(draw(index), draw(index))
    how = draw(st.sampled_from(["cond", "scan", "while", "jit"]))
    bodies = tuple(draw(_level_body(levels, depth - 1)) for _ in range(2 if how == "cond" else 1))
    return Nested(how, draw(index), draw(st.integers(int(how == "scan"), 3)), bodies)


@st.composite
def _level_body(draw: st.DrawFn, levels: _Levels, depth: int) -> tuple[Step, ...]:
    """A body that leaves as many elements and gradients as it found, and ends with a value."""
    before, gradients = list(levels.held), levels.gradients
    steps = list(draw(_steps(levels, depth)))
    if levels.gradients > gradients:
        steps.append(TakeSum(levels.gradients))
        levels.gradients = 0
    if levels.gradients < gradients:
        steps.append(Apply(0, gradients - levels.gradients, 0))
        levels.gradients = gradients
    for queue, (now, then) in enumerate(zip(levels.held, before, strict=True)):
        if now > then:
            steps.append(Take(queue, now - then, "one by one"))
        elif now < then:
            steps.append(Put(queue, queue, then - now, True))
    levels.held[:] = before
    return (*steps, Sum(-1, 0))


@st.composite
def queue_programs(draw: st.DrawFn) -> QueueProgram:
    """Programs over one or two queues."""
    kinds = tuple(draw(st.lists(st.sampled_from(QueueKind), min_size=1, max_size=2)))
    times = draw(st.integers(1, 2))
    steps = (_steps if times == 1 else _level_body)(_Levels(kinds, [FULL] * len(kinds)), 2)
    return QueueProgram(kinds, draw(steps), times)


def queues_of(program: QueueProgram) -> list[Any]:
    """New queues for a program, each with `FULL` elements, and last an accumulator of nothing."""
    made: list[Any] = []
    for number, kind in enumerate(program.kinds):
        name = f"q{number}"
        match kind:
            case QueueKind.FIFO:
                made.append(FIFOQueue(CAPACITY, SPEC, name=name))
            case QueueKind.PRIORITY:
                made.append(PriorityQueue(CAPACITY, SPEC, name=name))
            case QueueKind.SHUFFLE:
                made.append(RandomShuffleQueue(CAPACITY, HELD_BACK, SPEC, seed=7, name=name))
        for element in elements_at_start():
            made[-1].enqueue(element)
    rows = RowGradient(jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 1), jnp.int32), (5, 1))
    spec = (jax.ShapeDtypeStruct((2,), jnp.int32), rows)
    return [*made, ConditionalAccumulator(spec, name="gradients", reduction="sum")]


def elements_at_start() -> list[tuple[Any, Any]]:
    """What each queue holds at first."""
    return [(np.int32(5 - 3 * n), np.array([n, 10 * n], np.int32)) for n in range(FULL)]


def variables_of() -> list[Variable]:
    """Two new variables."""
    return [Variable(jnp.int32(index + 1), name=f"v{index}") for index in range(2)]
