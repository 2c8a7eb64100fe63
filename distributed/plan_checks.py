"""What must be true of a plan before a task keeps it.

Why: a plan may come from a peer, and a task runs it without looking again. Invariant: a plan that passes runs without
an index going out of range, and every item of it can get its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflow.lowering.plan import Branch, Call, Plan, Scalar, Scan, UseResource, While
from dflow.lowering.resource_use import ResourceUse
from dflow.lowering.waits import gives, takes
from dflow.tracing import ops
from dflow.tracing.errors import ParseError, WireError
from dflow.tracing.types import parse_dtype

#: A plan may number this many slots.
MAX_SLOTS = 1 << 20
#: A name, or the user's line, may have this many characters.
MAX_TEXT = 4096
#: A queue may be asked for this many elements at once, or as its capacity.
MAX_COUNT = 1 << 31

#: The ops that say how many they want.
COUNTED = frozenset({"queue.dequeue_many", "queue.dequeue_up_to", "accumulator.take"})


def check_plan(plan: Plan, task: str, programs: int) -> None:
    """Raise WireError unless `task` can run `plan` with so many programs."""
    if plan.task != task:
        raise WireError(f"a plan for {plan.task} was sent to {task}")
    if not 0 <= plan.slots <= MAX_SLOTS:
        raise WireError(f"a plan of {plan.slots} slots; 0 to {MAX_SLOTS} are taken")
    slots = {slot for item in plan.items for slot in (*takes(item), *gives(item))} | {*plan.feeds, *plan.fetches}
    slots |= {scalar.slot for scalar in plan.scalars}
    _check_range("slot", slots, plan.slots)
    _check_range("item", {index for item in plan.items for index in item.after}, len(plan.items))
    _check_range("program", {item.program for item in plan.items if isinstance(item, Call)}, programs)


def check_from_peer(plan: Plan) -> None:
    """Raise WireError unless a plan that passed `check_plan` is one that a task runs for others."""
    if plan.bodies or any(isinstance(item, Branch | While | Scan) for item in plan.items):
        raise WireError(f"a plan with branches or loops that wait was sent to {plan.task}, which runs none for others")
    if plan.names and len(plan.names) != len(plan.items):
        raise WireError(f"a plan of {len(plan.items)} items has names for {len(plan.names)}")
    for scalar in plan.scalars:
        _check_scalar(scalar)
    for item in plan.items:
        if isinstance(item, UseResource):
            check_use(ResourceUse(item.op, item.count, item.timeout_s, item.cancel_pending, item.line))
    _check_filled_once(plan)
    _check_order(plan)


def check_use(use: ResourceUse) -> None:
    """Raise WireError unless this is an op on a queue or an accumulator that can be done at all."""
    if use.op not in ops.RESOURCE_OPS:
        raise WireError(f"{use.op[:MAX_TEXT]!r} is no op on a queue or an accumulator")
    least = 1 if use.op == "accumulator.take" else 0
    if use.op in COUNTED and not least <= use.count <= MAX_COUNT:
        raise WireError(f"{use.op} of {use.count}; {least} to {MAX_COUNT} are taken")
    if use.timeout_s != use.timeout_s:
        raise WireError(f"{use.op} with a timeout of {use.timeout_s} s, which is no number")
    if len(use.where) > MAX_TEXT:
        raise WireError(f"{use.op} with a line of {len(use.where)} characters; {MAX_TEXT} are taken")


def _check_range(what: str, used: set[int], count: int) -> None:
    outside = sorted(index for index in used if not 0 <= index < count)
    if outside:
        raise WireError(f"a plan with {count} {what}s names {what} {outside[0]}")


def _check_scalar(scalar: Scalar) -> None:
    try:
        dtype = parse_dtype(scalar.dtype)
    except (ParseError, ValueError) as error:
        raise WireError(f"slot {scalar.slot} holds a number of no dtype: {error}") from error
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.itemsize != len(scalar.data):
        raise WireError(f"slot {scalar.slot} holds a number of {len(scalar.data)} bytes as {scalar.dtype}")


def _check_filled_once(plan: Plan) -> None:
    """Raise WireError where two of items, feeds and numbers fill one slot."""
    filled = [*dict.fromkeys(plan.feeds), *(scalar.slot for scalar in plan.scalars)]
    filled += [slot for item in plan.items for slot in gives(item)]
    if twice := _repeated(filled):
        raise WireError(f"slot {twice[0]} of a plan is filled twice")


def _check_order(plan: Plan) -> None:
    """Raise WireError where items wait for each other in a circle, so that none of them gets its turn."""
    makers = {slot: index for index, item in enumerate(plan.items) for slot in gives(item)}
    waits = [{*item.after, *(makers[slot] for slot in takes(item) if slot in makers)} for item in plan.items]
    left, later = [len(before) for before in waits], [list[int]() for _ in waits]
    for index, before in enumerate(waits):
        for earlier in before:
            later[earlier].append(index)
    ready = [index for index, count in enumerate(left) if count == 0]
    for index in ready:
        for other in later[index]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    if len(ready) < len(waits):
        raise WireError(f"item {next(i for i, count in enumerate(left) if count)} of a plan waits for itself")


def _repeated(numbers: Sequence[int]) -> list[int]:
    seen: set[int] = set()
    return [number for number in numbers if number in seen or seen.add(number)]  # type: ignore[func-returns-value]
