"""Items of a plan in a step that may be repeated: each change of state is made by one attempt (`applied_steps`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import msgspec

from dflow.lowering.programs.program import Program
from dflow.lowering.queues.pending_operations import Cancel, HeldResource, OnResults
from dflow.lowering.state.applied_steps import StepAttempt
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.kept_results import MOST_KEPT
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import ANYTHING
from dflow.lowering.steps.plan import Call
from dflow.tracing.ir.resource_op import ResourceOp


def changes_of(item: Call) -> tuple[str, ...]:
    """Return the keys of the state that a call changes, and that a repeated step must not change again.

    A call that changes something unknown, such as by a Python callback, is made once if it returns nothing.
    """
    if item.touches_anything and not item.gives:
        return (*item.writes, ANYTHING)
    return item.writes


def call_once(
    attempt: StepAttempt,
    store: Store,
    program: Program,
    item: Call,
    operands: Sequence[Any],
    state: StepState | None,
) -> Sequence[jax.Array]:
    """Return the results of a call, which changes its variables unless an earlier attempt has.

    Then these are the results of that attempt, or if they are large, those of the program on copies of the variables.
    """

    def without_changes() -> Sequence[jax.Array]:
        return store.call_on_copies(program, item.writes, item.reads, operands) if item.gives else ()

    return attempt.once(
        changes_of(item),
        lambda: store.call(program, item.writes, item.reads, operands, state),
        without_changes,
        _are_kept,
    )


def _are_kept(results: Sequence[jax.Array]) -> bool:
    return len(results) > 0 and sum(result.nbytes for result in results) <= MOST_KEPT


def start_once(
    attempt: StepAttempt,
    key: str,
    held: HeldResource,
    op: ResourceOp,
    operands: Sequence[Any],
    on_results: OnResults,
    has_results: bool,
) -> Cancel:
    """Start an op on a queue or accumulator, unless an earlier attempt has made it; as `HeldResource.start`."""
    if not held.is_recorded:
        # A round is opened again after a failed update, for further gradients, but has one of each worker.
        return held.start(msgspec.structs.replace(op, giver=attempt.run), operands, on_results)
    return attempt.start_once(key, partial(held.start, op, operands), on_results, has_results=has_results)
