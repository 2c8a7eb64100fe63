"""Plans registered with a task, and the steps that run them."""

from __future__ import annotations

from typing import NamedTuple

from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message, Notice, Request
from dflow.lowering.state.applied_steps import StepOfRun


class Registered(Message, frozen=True):
    """Answer to `RegisterPlan`: the handle that `RunPlan` uses; or which programs the task still needs.

    `missing`  indices of the plan's programs that the task does not have: the plan is not registered, register it with
               these
    """

    handle: int = 0
    missing: tuple[int, ...] = ()


class RegisterPlan(Request[Registered], frozen=True):
    """Keep a plan for later runs.

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


class Ahead(NamedTuple):
    """How a part begins before the task that starts its step calls it.

    after        number of an earlier step of that task, whose part must have ended before this one begins; 0 for none
    is_next      whether that task calls the step right after `after`: the first values leave with the report that its
                 part has ended
    is_numbered  whether the number of the step in its run is known; if not, `ReleaseStep` brings it
    """

    after: int = 0
    is_next: bool = False
    is_numbered: bool = True


class RunPlan(Request[Ok], frozen=True):
    """Run a registered plan as part of a step; answered by `Ok` when the plan has ended.

    `ahead`  how the part begins before `origin` calls the step. It changes no state until `ReleaseStep` arrives, or,
             if `is_numbered`, the first value that `origin` sends in the step; None for a step that was called
    `of`     the call, of a run's step, that this is an attempt at: an attempt after one that changed state changes no
             state again; None for a step of no run
    """

    speaker = "origin"

    handle: int
    origin: str
    step: int
    ahead: Ahead | None = None
    of: StepOfRun | None = None


class ReleaseStep(Notice, frozen=True):
    """The task `origin` has called a step whose part here began ahead; `of` is as in `RunPlan`, or None if known."""

    speaker = "origin"

    origin: str
    step: int
    of: StepOfRun | None = None


class ForgetResults(Notice, frozen=True):
    """Free the kept results of the steps of `run` that `origin` did: all have ended except for the `unfinished` ones.

    `first` is the number of the first step of the process of `origin`.
    """

    speaker = "origin"

    origin: str
    first: int
    run: str
    unfinished: tuple[int, ...]


class CancelStep(Request[Ok], Notice, frozen=True):
    """Cancel the rest of a step and discard its values. A request, answered by `Ok`, or a notification."""

    speaker = "origin"

    origin: str
    step: int
    reason: str
