"""What one task does in one step, as data that can be sent to it.

A plan is a small dataflow program over numbered slots, each holding one array. An item runs when the slots it
takes are filled and the items it comes `after` are done; nothing else orders the items, and their position in
`Plan.items` carries no meaning. Programs (compiled XLA computations) are named by their index and travel beside
the plan, so that a plan stays a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dflow.tracing.parallel_iterations import DEFAULT_PARALLEL_ITERATIONS
from dflow.tracing.queue_settings import DEFAULT_TIMEOUT_S


class Call(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="call"):
    """Run a program on variables and slots.

    The program's arguments are the values of `writes`, then of `reads`, then the slots `takes`; its results are
    the new values of `writes`, then the slots `gives`. The values of `writes` are donated, unless it `keeps` them. It
    runs on `device`, such as `cpu:1`; given none, wherever JAX runs it. `touches_anything` is of one with effects that
    nobody told us of. One that is `quick` surely ends within a millisecond or so of one core.
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
    quick: bool = False


class Copy(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="copy"):
    """Put the array in slot `take`, as it is on `device`, such as `cpu:1`, into slot `give`."""

    device: str
    take: int
    give: int
    after: tuple[int, ...] = ()


class Read(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="read"):
    """Put the values of variables, as of one moment, into the slots `gives`.

    Nothing is copied: they are the store's own, which nothing but a `Copy` or a `Send` may take.
    """

    keys: tuple[str, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()


class Send(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="send"):
    """Send the array in slot `take` over `edge` to the task `destination`."""

    edge: str
    destination: str
    take: int
    after: tuple[int, ...] = ()


class Recv(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="recv"):
    """Wait for the array that the task `source` sends over `edge`, and put it into slot `give`."""

    edge: str
    source: str
    give: int
    dtype: str
    shape: tuple[int, ...]
    after: tuple[int, ...] = ()


class UseResource(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="use"):
    """Do `op` on the queue or accumulator `key`, waiting for it. `line` is the user's, as messages end with it."""

    key: str
    op: str
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    count: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    cancel_pending: bool = False
    line: str = ""
    after: tuple[int, ...] = ()


class Branch(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="branch"):
    """Run the one of `bodies` whose place is in the first slot of `takes`, on the other slots."""

    bodies: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()


class While(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="while"):
    """Run `body` as long as `test` gives true, both on `takes`; `body` renews the last `carry` of these.

    At most `parallel` turns are under way at once.
    """

    test: int
    body: int
    carry: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()
    parallel: int = DEFAULT_PARALLEL_ITERATIONS


class Scan(msgspec.Struct, frozen=True, repr_omit_defaults=True, tag="scan"):
    """Run `body` `length` times on `takes`, of whose last `rows` it takes a row; it renews the `carry` before these.

    What it gives beside the carry, of the types `stacked`, is stacked. At most `parallel` turns are under way at once.
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


#: Items that a task runs by itself, between programs; they may wait.
HostItem = UseResource | Branch | While | Scan
Item = Call | Copy | Read | Send | Recv | HostItem


class Scalar(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A number that is in `slot` from the start; `data` are its bytes."""

    slot: int
    dtype: str
    data: bytes


class Plan(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """The items one task runs in one step.

    `task`     the task this plan is for, such as `/job:ps/task:0`
    `slots`    how many slots the items use; slots are numbered from 0
    `feeds`    slots filled from the caller's arguments, in order
    `fetches`  slots handed back to the caller, in order
    `scalars`  slots filled with numbers of the program
    `bodies`   the plans that branches and loops run, by number; their programs are those of the whole plan
    `names`    what errors call each item: the node it was, and the user's line
    """

    task: str
    slots: int
    items: tuple[Item, ...]
    feeds: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    bodies: tuple[Plan, ...] = ()
    names: tuple[str, ...] = ()


def calls_in(plan: Plan) -> Iterator[Call]:
    """The calls of a plan and of the bodies within it."""
    for item in plan.items:
        if isinstance(item, Call):
            yield item
    for body in plan.bodies:
        yield from calls_in(body)
