"""Values that tasks send each other within a step."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Notice


class Values(Notice, frozen=True, omit_defaults=True):
    """The values of an edge in a step, in the payload, whose layout the receiver's plan has.

    `was_offered`  whether they answer a `Pull`
    """

    origin: str
    step: int
    edge: str
    was_offered: bool = False


class Offer(Notice, frozen=True):
    """The sender keeps the values of an edge, of `size_bytes` bytes, until the receiver sends `Pull`."""

    origin: str
    step: int
    edge: str
    size_bytes: int


class Pull(Notice, frozen=True):
    """Send the values that were offered, or with `wanted` false, discard them."""

    origin: str
    step: int
    edge: str
    wanted: bool = True


class Credit(Notice, frozen=True):
    """The sender has taken `size_bytes` of the values that the other task pushed; see `flow_control`."""

    size_bytes: int
