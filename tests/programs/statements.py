"""Random stateful programs as data, so that Hypothesis can shrink them. Indices count modulo the number of objects.

A program runs on a stack of values, each float32 of shape (3,) with small whole numbers, so every run is exact, however
it is compiled. A body sees the stack around it, then its own arguments, and returns its last value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflow.tracing.ir.queue_settings import QueueKind


@dataclass(frozen=True)
class Op:
    """Push the result of op `kind` on two values."""

    kind: str
    left: int
    right: int


@dataclass(frozen=True)
class Read:
    """Push the value of a variable."""

    variable: int


@dataclass(frozen=True)
class Gather:
    """Push rows of a variable, at indices made from a value, some of them past an end."""

    variable: int
    value: int


@dataclass(frozen=True)
class Write:
    """Update a variable by a value; an update of rows takes its indices from the value too.

    Under a batch the value comes from outside of the batch, so it is the same for all; a sum takes any value.
    """

    variable: int
    value: int
    kind: str
    sums: bool = True


@dataclass(frozen=True)
class Log:
    """Print a value, by an effect that must keep its position."""

    value: int


@dataclass(frozen=True)
class Put:
    """Enqueue `count` elements made from a value, one by one or by one op."""

    queue: int
    value: int
    count: int
    at_once: bool


@dataclass(frozen=True)
class Take:
    """Dequeue `count` elements and push their sum; one by one, by one op, or up to that number."""

    queue: int
    count: int
    how: str


@dataclass(frozen=True)
class Size:
    """Push a queue's size."""

    queue: int


@dataclass(frozen=True)
class Apply:
    """Apply `count` gradients made from a value, of the step `age` steps ago, and push the number of fresh ones."""

    value: int
    count: int
    age: int


@dataclass(frozen=True)
class TakeSum:
    """Take the sum of at least `count` gradients."""

    count: int


@dataclass(frozen=True)
class Ask:
    """Push a number of the accumulator: its "step", "count" or "dropped"; or call "set_step" with the next step."""

    what: str


@dataclass(frozen=True)
class Loop:
    """Run `body` `turns` times, by `how`, from a value; push the result of the loop.

    A "while" or "bounded" loop ends early when the sum of variable `watched` is a multiple of 5.
    """

    how: str
    value: int
    turns: int
    body: tuple[Statement, ...]
    reverse: bool = False
    watched: int | None = None


@dataclass(frozen=True)
class Cond:
    """Run one of the branches, chosen by a value; under a batch by one from outside, unless the batch is `divided`."""

    test: int
    branches: tuple[tuple[Statement, ...], ...]
    divided: bool = False


@dataclass(frozen=True)
class Call:
    """Run `body` on a value as a function of a kind: "jit", "dflow.jit", "checkpoint".

    A "custom_jvp" or "custom_vjp" function sees only its argument; its rule is not the derivative of its result.
    """

    how: str
    value: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class On:
    """Run `body` in place, under a device scope."""

    device: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Batch:
    """Run `body` under vmap on `size` values made from one; push the sum over the batch."""

    value: int
    size: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Derive:
    """Push derivatives of `body`, by `how`, with respect to a value and to the variables that have derivatives."""

    how: str
    value: int
    variables: tuple[int, ...]
    body: tuple[Statement, ...]


Statement = (
    Op
    | Read
    | Gather
    | Write
    | Log
    | Put
    | Take
    | Size
    | Apply
    | TakeSum
    | Ask
    | Loop
    | Cond
    | Call
    | On
    | Batch
    | Derive
)


@dataclass(frozen=True)
class Program:
    """A function of two values, with a variable for each of `types` (dtype, shape) and a queue for each of `queues`.

    One that `accumulates` has an accumulator too, of a vector and of rows.
    """

    types: tuple[tuple[str, tuple[int, ...]], ...]
    statements: tuple[Statement, ...]
    queues: tuple[QueueKind, ...] = ()
    accumulates: bool = False

    def __call__(self, machine: Any, x: Any, y: Any) -> tuple[Any, ...]:
        """Run on a machine; return the last four values: enough to see most mistakes, few enough to leave dead ops."""
        return tuple(machine.run(self.statements, [x, y])[-4:])
