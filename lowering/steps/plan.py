"""The plan of a task for a step, as data that can be sent to the task.

A plan is a small dataflow program over numbered registers, each holding one array. An item runs when the registers in
`takes` are filled and the items in `after` are done. Nothing else orders the items: their position in `Plan.items` has
no meaning. Programs (compiled XLA computations) are named by their index and sent separately, so a plan has a few
hundred bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.parallel_iterations import DEFAULT_PARALLEL_ITERATIONS


class Call(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="call"):
    """Run a program on variables and registers.

    The program's arguments are the values of `writes`, then of `reads`, then the registers `takes`; its results are
    the new values of `writes`, then the registers `gives`. The values of `writes` are donated, unless `keeps`. The
    program runs on `device`, such as `cpu:1`, or where JAX puts it. With `touches_anything` it may have any effect, for
    example in a Python callback. A call of an `asynchronous` program returns without waiting for its results, and runs
    no Python.
    """

    program: int
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()
    device: str = ""
    touches_anything: bool = False
    keeps: bool = False
    asynchronous: bool = False


class Copy(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="copy"):
    """Copy the array in register `take` to `device`, such as `cpu:1`, and put the copy into register `give`."""

    device: str
    take: int
    give: int
    after: tuple[int, ...] = ()


class CheckIds(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="check"):
    """Put values from registers `takes` into `gives`, if each number in the first is a row of `table`; else fail.

    The table has `size` rows. `line` is the user's, and `noun` what the numbers are, as the error shows them.
    """

    size: int
    table: str
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    line: str = ""
    after: tuple[int, ...] = ()
    noun: Literal["ids", "segments"] = "ids"


class Read(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="read"):
    """Put the values of variables at one moment into the registers `gives`.

    They are not copied but alias the store's buffers, so only a `Copy` or a `Send` may take them.
    """

    keys: tuple[str, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()


class Send(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="send"):
    """Send the arrays in the registers `takes`, as one message, over `edge` to the task `destination`.

    With `has_count`, `takes` are an array and the number of its first rows, which alone are sent.
    """

    edge: str
    destination: str
    takes: tuple[int, ...]
    after: tuple[int, ...] = ()
    has_count: bool = False


class Recv(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="recv"):
    """Wait for the arrays that the task `source` sends over `edge`, and put them into the registers `gives`.

    `types` has the dtype and the shape of each. With `fill`, they are an array and the number of its first rows that
    came; the other rows are `fill`.
    """

    edge: str
    source: str
    gives: tuple[int, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...]
    after: tuple[int, ...] = ()
    fill: int | None = None


class UseResource(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="use"):
    """Run `op` on the queue or accumulator `key`; it may wait."""

    key: str
    op: ResourceOp
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class Branch(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="branch"):
    """Run one of `bodies`. The first register of `takes` holds its index, the others its operands."""

    bodies: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()


class While(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="while"):
    """Run `body` while `test` returns true, both on `takes`; `body` returns new values of the last `carry` of these.

    At most `parallel` iterations run concurrently.
    """

    test: int
    body: int
    carry: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()
    parallel: int = DEFAULT_PARALLEL_ITERATIONS


class Scan(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="scan"):
    """Run `body` `length` times on `takes`.

    `takes` ends with `carry` initial values of the carry, then `rows` arrays; each iteration gets one row of each.
    `body` returns the new carry, then results of the types `stacked`, which are stacked over the iterations. At most
    `parallel` iterations run concurrently.
    """

    body: int
    length: int
    reverse: bool
    carry: int
    rows: int
    stacked: tuple[str, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()
    parallel: int = DEFAULT_PARALLEL_ITERATIONS


Item = Call | CheckIds | Copy | Read | Send | Recv | UseResource | Branch | While | Scan


class Scalar(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """An initial number for `register`, as the bytes `data`."""

    register: int
    dtype: str
    data: bytes


class Plan(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """The items that one task runs in one step.

    `task`       the task this plan is for, such as `/job:ps/task:0`
    `registers`  number of registers that the items use; they are numbered from 0
    `feeds`      registers filled from the caller's arguments, in order
    `fetches`    registers returned to the caller, in order
    `scalars`    registers filled with numbers of the program
    `bodies`     the plans that branches and loops run, by index; they share the programs of the whole plan
    `names`      name of each item in errors: its node, and the user's line
    """

    task: str
    registers: int
    items: tuple[Item, ...]
    feeds: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    bodies: tuple[Plan, ...] = ()
    names: tuple[str, ...] = ()


def calls_in(plan: Plan) -> Iterator[Call]:
    """Yield the calls of a plan and of the bodies within it."""
    for item in plan.items:
        if isinstance(item, Call):
            yield item
    for body in plan.bodies:
        yield from calls_in(body)
