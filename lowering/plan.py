"""What one task does in one step, as data that can be sent to it.

A plan is a small dataflow program over numbered slots, each holding one array. An item runs when the slots it
takes are filled and the items it comes `after` are done; nothing else orders the items, and their position in
`Plan.items` carries no meaning. Programs (compiled XLA computations) are named by their index and travel beside
the plan, so that a plan stays a few hundred bytes.
"""

from __future__ import annotations

import msgspec


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run a program on variables and slots.

    The program's arguments are the values of `writes`, then of `reads`, then the slots `takes`; its results are
    the new values of `writes`, then the slots `gives`. The values of `writes` are donated.
    """

    program: int
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    after: tuple[int, ...] = ()


class Send(msgspec.Struct, frozen=True, tag="send"):
    """Send the array in slot `take` over `edge` to the task `destination`."""

    edge: str
    destination: str
    take: int
    after: tuple[int, ...] = ()


class Recv(msgspec.Struct, frozen=True, tag="recv"):
    """Wait for the array that the task `source` sends over `edge`, and put it into slot `give`."""

    edge: str
    source: str
    give: int
    dtype: str
    shape: tuple[int, ...]
    after: tuple[int, ...] = ()


Item = Call | Send | Recv


class Plan(msgspec.Struct, frozen=True):
    """The items one task runs in one step.

    `task`     the task this plan is for, such as `/job:ps/task:0`
    `slots`    how many slots the items use; slots are numbered from 0
    `feeds`    slots filled from the caller's arguments, in order
    `fetches`  slots handed back to the caller, in order
    """

    task: str
    slots: int
    items: tuple[Item, ...]
    feeds: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()
