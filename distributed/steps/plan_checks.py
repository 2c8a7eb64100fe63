"""Checks of a plan before a task keeps it.

Why: a plan may come from a peer, and a task runs it without further checks. Invariant: in a plan that passes, no index
goes out of range, and no item waits for ever for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

import jax
import jax.numpy as jnp

from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.steps.executable import bodies_of, gives, needs, takes
from dflow.lowering.steps.plan import Branch, Call, Plan, Scalar, Scan, UseResource, While
from dflow.tracing.errors import ParseError, WireError
from dflow.tracing.ir import ops
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, parse_dtype, parse_type

#: Most registers (numbered values) of a plan.
MAX_REGISTERS = 1 << 20
#: Most levels of bodies nested in bodies.
MAX_DEPTH = 64
#: Most characters of a name, or of the user's line.
MAX_TEXT = 4096
#: Most steps of a run that a process began and that have not ended.
MAX_UNFINISHED = 4096
#: Largest capacity of a queue, and most elements that one op may take.
MAX_COUNT = 1 << 31


def check_step_of_run(step: StepOfRun) -> None:
    """Raise WireError unless the numbers and sizes of a step's identity are within their limits."""
    if len(step.unfinished) > MAX_UNFINISHED:
        raise WireError(
            f"run {step.run[:64]!r}: expected at most {MAX_UNFINISHED} steps that a process began and that failed, got "
            f"{len(step.unfinished)}\n  remove the cause of the failures, and start the process again"
        )
    numbers = step.number, step.call, step.epoch
    if len(step.run) > MAX_TEXT or not 0 <= min(numbers) <= max(numbers) <= MAX_COUNT:
        raise WireError(f"expected a step of a run, got call {step.call} of step {step.number} of {step.run[:64]!r}")


def check_plan(plan: Plan, task: str, programs: int, depth: int = 0) -> None:
    """Raise WireError unless `plan` is of `task`, and its indices fit its registers, items, bodies and programs."""
    if depth > MAX_DEPTH:
        raise WireError(f"nested bodies of a plan: expected at most {MAX_DEPTH} levels, got more")
    if plan.task != task:
        raise WireError(f"task of a plan: expected {task}, got {plan.task}")
    if not 0 <= plan.registers <= MAX_REGISTERS:
        raise WireError(f"registers of a plan: expected 0 to {MAX_REGISTERS}, got {plan.registers}")
    registers = {register for item in plan.items for register in (*takes(item), *gives(item))} | {
        *plan.feeds,
        *plan.fetches,
    }
    registers |= {scalar.register for scalar in plan.scalars}
    _check_range("register", registers, plan.registers)
    _check_range("item", {index for item in plan.items for index in item.after}, len(plan.items))
    _check_range("program", {item.program for item in plan.items if isinstance(item, Call)}, programs)
    for body in plan.bodies:
        check_plan(body, task, programs, depth + 1)
    for item in plan.items:
        if isinstance(item, Branch | While | Scan):
            _check_range("inner plan", {*bodies_of(item)}, len(plan.bodies))
            _check_control(item, plan.bodies)


def _check_control(item: Branch | While | Scan, bodies: Sequence[Plan]) -> None:
    """Raise WireError when a branch or a loop does not match the bodies that it runs."""
    taken, carry, rows, extra, results = len(item.takes), 0, 0, 0, len(item.gives)
    match item:
        case Branch():
            extra = 1
        case While():
            carry, results = item.carry, item.carry
        case Scan():
            carry, rows, results = item.carry, item.rows, item.carry + len(item.stacked)
    wanted = [results] * len(bodies_of(item))
    if isinstance(item, While):
        wanted[0] = 1
    fits = len(wanted) > 0 and min(carry, rows, taken - carry - rows - extra) >= 0 and results == len(item.gives)
    for number, count in zip(bodies_of(item), wanted, strict=True):
        fits = fits and len(bodies[number].feeds) == taken - extra and len(bodies[number].fetches) == count
    if not fits:
        raise WireError(f"{type(item).__name__.lower()} of {taken} values to {len(item.gives)} does not fit its bodies")
    if isinstance(item, While | Scan) and item.parallel < 1:
        raise WireError(f"parallel_iterations must be at least 1, got {item.parallel}")
    if isinstance(item, Scan):
        _check_stacked(item)


def _check_stacked(item: Scan) -> None:
    if item.length < 0:
        raise WireError(f"length of a loop: expected at least 0, got {item.length}")
    for text in item.stacked:
        try:
            row = parse_type(text)
        except (ParseError, ValueError) as error:
            raise WireError(f"stacked results of a loop: expected types: {error}") from error
        if not isinstance(row, ArrayType) or None in row.shape:
            raise WireError(f"stacked results of a loop: expected types of arrays, got {row}")


def check_from_peer(plan: Plan) -> None:
    """Raise WireError unless the names, scalars, ops and order of a peer's plan are valid; after `check_plan`."""
    for body in plan.bodies:
        check_from_peer(body)
    if plan.names and len(plan.names) != len(plan.items):
        raise WireError(f"names of a plan's items: expected {len(plan.items)}, got {len(plan.names)}")
    for scalar in plan.scalars:
        _check_scalar(scalar)
    for item in plan.items:
        if isinstance(item, UseResource):
            check_op(item.op)
    _check_filled_once(plan)
    _check_order(plan)


def check_op(op: ResourceOp) -> None:
    """Raise WireError unless this is a valid op on a queue or an accumulator."""
    definition = ops.RESOURCE_OPS.get(op.name)
    if definition is None:
        raise WireError(f"expected an op on a queue or an accumulator, got {op.name[:MAX_TEXT]!r}")
    least = definition.least_count
    if least is not None and not least <= op.count <= MAX_COUNT:
        raise WireError(f"{op.name}: expected a count of {least} to {MAX_COUNT}, got {op.count}")
    if op.timeout_s != op.timeout_s:
        raise WireError(f"{op.name}: expected a timeout in s, got {op.timeout_s}")
    if op.of is not None and (op.name != ops.queue_enqueue.name or len(op.of.feed) > MAX_TEXT or op.of.number < 0):
        raise WireError(f"{op.name}: expected an element of a feed, got {op.of.number} of {op.of.feed[:64]!r}")
    if len(op.line) > MAX_TEXT:
        raise WireError(f"{op.name}: expected a line of at most {MAX_TEXT} characters, got {len(op.line)}")


def _check_range(what: str, used: set[int], count: int) -> None:
    outside = sorted(index for index in used if not 0 <= index < count)
    if outside:
        raise WireError(f"a plan with {count} {what}s names {what} {outside[0]}")


def _check_scalar(scalar: Scalar) -> None:
    try:
        dtype = parse_dtype(scalar.dtype)
    except (ParseError, ValueError) as error:
        raise WireError(f"scalar of register {scalar.register}: expected a dtype: {error}") from error
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.itemsize != len(scalar.data):
        raise WireError(f"scalar of register {scalar.register}: expected {scalar.dtype}, got {len(scalar.data)} bytes")


def _check_filled_once(plan: Plan) -> None:
    """Raise WireError when two of the items, feeds and scalars fill one register."""
    filled = [*dict.fromkeys(plan.feeds), *(scalar.register for scalar in plan.scalars)]
    filled += [register for item in plan.items for register in gives(item)]
    if twice := [register for register, count in Counter(filled).items() if count > 1]:
        raise WireError(f"register {twice[0]} of a plan is filled twice")


def _check_order(plan: Plan) -> None:
    """Raise WireError when items wait for each other in a cycle."""
    try:
        TopologicalSorter(dict(enumerate(needs(plan)))).prepare()
    except CycleError as error:
        raise WireError(f"item {min(error.args[1])} of a plan waits for itself") from None
