"""The items of a straight line, each compiled to one function when the plan is first run.

Slots are filled and taken as a whole, so that the number of values costs no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import jax

from dflow.lowering.queues.channel import Channel, StepId
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.state.applied_steps import StepAttempt
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.repeated_views import RepeatedViews
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Call, CheckIds, Copy, Item, Read, Recv, Send, UseResource
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.repeated_step import call_once, changes_of, start_once
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.host_values import counted_rows, has_own_memory
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import InternalError
from dflow.tracing.primitives.id_checks import check_ids


class ItemsRun(Protocol):
    """What an item uses of the run of its plan; see `straight_line.StraightRun`."""

    slots: list[Any]
    channel: Channel
    step: StepId
    recorder: Recorder
    attempt: StepAttempt | None
    #: The ops on queues and accumulators that wait, by item.
    waiting_ops: set[int]

    def arrived(self, index: int, fill: Fill, values: Outcome[Any]) -> None:
        """Continue after the item at `index`, which waited, with its results, which `fill` puts into slots."""
        ...

    def cancel_at_end(self, cancel: Cancel) -> None:
        """Call `cancel` if the run fails while the operation waits."""
        ...


#: Runs one item of a run, or starts one that waits.
DoItem = Callable[[ItemsRun], None]
#: Fills slots with values.
Fill = Callable[[list[Any], Sequence[Any]], None]


def compiled_item(item: Item, index: int, executable: Executable, store: Store) -> tuple[DoItem, StepState | None]:
    """Return the function that runs an item, or starts one that waits, and the variables of a call."""
    match item:
        case Recv():
            return _receive(item, index, executable), None
        case Send():
            return _send(item), None
        case Call():
            program, state = executable.programs[item.program], None
            if item.writes or item.reads:
                state = store.step_state(program, item.writes, item.reads)
            return _call(item, index, executable, store, state), state
        case Read():
            return _read(item, index, executable, store), None
        case Copy():
            return _copy(item, executable), None
        case CheckIds():
            return _check_ids(item), None
        case UseResource():
            return _use_resource(item, index, executable, store), None
    raise InternalError(f"{type(item).__name__} in a straight line; please report this")


def taker(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return the function, in C, that takes the values of `slots` from the list of all slots."""
    ranges = ranges_of(slots)
    return itemgetter(*slots) if len(ranges) > 1 else itemgetter(ranges[0] if ranges else slice(0))


def ranges_of(slots: Sequence[int]) -> list[slice]:
    """Return the slices that have these slots, in this order."""
    ranges: list[slice] = []
    for slot in slots:
        if ranges and ranges[-1].stop == slot:
            ranges[-1] = slice(ranges[-1].start, slot + 1)
        else:
            ranges.append(slice(slot, slot + 1))
    return ranges


def _filler(slots: Sequence[int]) -> Fill:
    count, ranges = len(slots), ranges_of(slots)
    place = ranges[0] if len(ranges) == 1 else None

    def fill(held: list[Any], values: Sequence[Any]) -> None:
        if len(values) != count:
            raise InternalError(f"values of an item: expected {count}, got {len(values)}")
        if place is not None:
            held[place] = values
        else:
            for slot, value in zip(slots, values, strict=True):
                held[slot] = value

    return fill


def _receive(item: Recv, index: int, executable: Executable) -> DoItem:
    edge, source, layout = item.edge, item.source, executable.layouts[index]
    fill = _filler(item.gives)
    return lambda run: run.channel.receive(run.step, edge, source, layout, partial(run.arrived, index, fill))


def _send(item: Send) -> DoItem:
    edge, destination, take = item.edge, item.destination, taker(item.takes)
    if item.has_count:
        return lambda run: run.channel.send(run.step, edge, destination, counted_rows(*take(run.slots)))
    return lambda run: run.channel.send(run.step, edge, destination, take(run.slots))


def _call(item: Call, index: int, executable: Executable, store: Store, state: StepState | None) -> DoItem:
    program = executable.programs[item.program]
    take, fill = taker(item.takes), _filler(item.gives)
    changes = changes_of(item)
    # All copies from a GPU start together, and while it still computes. One after the other, each with a wait for
    # the GPU, they took 14 of the 35 ms of a step with thirteen sends.
    copied = executable.sent_results(index) if has_own_memory() else ()

    def do(run: ItemsRun) -> None:
        operands = take(run.slots)
        if changes and run.attempt is not None and run.attempt.covers_programs:
            results = call_once(run.attempt, store, program, item, operands, state)
        else:
            results = store.call(program, item.writes, item.reads, operands, state)
        for place in copied:
            results[place].copy_to_host_async()
        fill(run.slots, results)
        if run.recorder.watched is not None:
            written = state.written if state is not None else None
            run.recorder.called((*results, *(written or ())), run.step, executable.plan, index)

    return do


def _read(item: Read, index: int, executable: Executable, store: Store) -> DoItem:
    keys, fill = item.keys, _filler(item.gives)
    if index in executable.sent:
        views = RepeatedViews(store, keys)
        return lambda run: fill(run.slots, views())

    def do(run: ItemsRun) -> None:
        values = store.snapshot(keys)
        fill(run.slots, [values[key] for key in keys])

    return do


def _copy(item: Copy, executable: Executable) -> DoItem:
    take, give, device = item.take, item.give, executable.devices[item.device]

    def do(run: ItemsRun) -> None:
        run.slots[give] = jax.device_put(run.slots[take], device)

    return do


def _check_ids(item: CheckIds) -> DoItem:
    def do(run: ItemsRun) -> None:
        check(item, run.slots)

    return do


def check(item: CheckIds, slots: list[Any]) -> None:
    """Run the item. Raises InputError."""
    ids = slots[item.takes[0]]
    wait_until_computed((ids,))
    check_ids(ids, item.size, item.table, item.line, item.noun)
    for take, give in zip(item.takes, item.gives, strict=True):
        slots[give] = slots[take]


def _use_resource(item: UseResource, index: int, executable: Executable, store: Store) -> DoItem:
    key, op, take, fill = item.key, executable.resource_ops[index], taker(item.takes), _filler(item.gives)

    def do(run: ItemsRun) -> None:
        held, operands, arrived = store.resource(key), list(take(run.slots)), partial(run.arrived, index, fill)
        run.waiting_ops.add(index)
        if run.attempt is None:
            run.cancel_at_end(held.start(op, operands, arrived))
        else:
            run.cancel_at_end(start_once(run.attempt, key, held, op, operands, arrived, bool(item.gives)))

    return do
