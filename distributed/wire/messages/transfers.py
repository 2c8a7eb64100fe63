"""Values that tasks send each other within a step."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Notice


class Tensor(Notice, frozen=True):
    """The value of an edge in a step, in the payload."""

    origin: str
    step: int
    edge: str
    dtype: str
    shape: tuple[int, ...]


class PulledTensor(Tensor, frozen=True):
    """The value of an offer, sent after `Pull`."""


class Offer(Notice, frozen=True):
    """The sender keeps the value of an edge, of `size_bytes` bytes, until the receiver sends `Pull`."""

    origin: str
    step: int
    edge: str
    size_bytes: int


class Pull(Notice, frozen=True):
    """Send the value that was offered, or with `wanted` false, discard it."""

    origin: str
    step: int
    edge: str
    wanted: bool = True


class Credit(Notice, frozen=True):
    """The sender has taken `size_bytes` of the values that the other task pushed; see `flow_control`."""

    size_bytes: int
