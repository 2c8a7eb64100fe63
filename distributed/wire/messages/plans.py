"""Plans registered with a task, the steps that run them, and the values that tasks send each other in a step."""

from __future__ import annotations

from dflow.distributed.wire.messages.connection import Ok
from dflow.distributed.wire.messages.message import Message, Notice, Request


class Wanted(Message, frozen=True):
    """The indices of a plan's programs that the task does not have: send the plan again, with these."""

    programs: tuple[int, ...]


class Registered(Message, frozen=True):
    """The handle that `RunPlan` uses for a registered plan."""

    handle: int


class RegisterPlan(Request[Registered | Wanted], frozen=True):
    """Keep a plan for later runs; answered by `Registered`, or by `Wanted` when programs are missing.

    `plan` is a msgspec-encoded `dflow.lowering.steps.plan.Plan`. The payload holds the exported programs one after the
    other, `program_sizes` bytes each. `programs` lists the SHA-256 of each. A program that the task already has may
    be omitted, with size 0. `programs` may be empty when all programs are in the payload.
    """

    plan: bytes
    program_sizes: tuple[int, ...]
    programs: tuple[bytes, ...] = ()


class ReleasePlan(Notice, frozen=True):
    """Undo one registration of a plan."""

    handle: int


class RunPlan(Request[Ok], frozen=True):
    """Run a registered plan as part of a step; answered by `Ok` when the plan has ended."""

    speaker = "origin"

    handle: int
    origin: str
    step: int


class CancelStep(Request[Ok], Notice, frozen=True):
    """Cancel the rest of a step and discard its values. A request, answered by `Ok`, or a notification."""

    speaker = "origin"

    origin: str
    step: int
    reason: str


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
