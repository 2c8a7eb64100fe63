"""The items of a plan, each compiled to one function when the plan is first run.

Slots are filled and taken as a whole, so that the number of values costs no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.repeated_views import repeated_views
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import CompiledPlan, DoItem, Execution, Fill
from dflow.lowering.steps.loops import Loop
from dflow.lowering.steps.plan import Branch, Call, CheckIds, Copy, Item, Read, Recv, Scan, Send, UseResource, While
from dflow.lowering.steps.repeated_step import call_once, changes_of, start_once
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.host_values import counted_rows, has_own_memory
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import InternalError
from dflow.tracing.primitives.id_checks import check_ids


def taker(registers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the function, in C, that takes the values of `registers` from the list of all registers."""
    ranges = ranges_of(registers)
    return itemgetter(*registers) if len(ranges) > 1 else itemgetter(ranges[0] if ranges else slice(0))


def ranges_of(registers: Sequence[int]) -> list[slice]:
    """Return the slices that have these registers, in this order."""
    ranges: list[slice] = []
    for register in registers:
        if ranges and ranges[-1].stop == register:
            ranges[-1] = slice(ranges[-1].start, register + 1)
        else:
            ranges.append(slice(register, register + 1))
    return ranges


def _filler(registers: Sequence[int], unused: Set[int] = frozenset()) -> Fill:
    """Return the function that fills `registers`, except the `unused` ones, with values."""
    count, ranges = len(registers), ranges_of(registers)
    span = ranges[0] if len(ranges) == 1 and unused.isdisjoint(registers) else None
    kept = [(index, register) for index, register in enumerate(registers) if register not in unused]

    def fill(held: list[Any], values: Sequence[Any]) -> None:
        if len(values) != count:
            raise InternalError(f"values of an item: expected {count}, got {len(values)}")
        if span is not None:
            held[span] = values
        else:
            for index, register in kept:
                held[register] = values[index]

    return fill


class ItemCompiler:
    """Compiles the items of a plan, for the variables and resources of `store`.

    states        the variables of each call, by item
    unused        registers whose values no item takes
    compile_body  compiles the body of a branch or a loop; see `compile_plan.compiled_plan`
    """

    def __init__(
        self,
        executable: Executable,
        store: Store,
        states: Mapping[int, StepState],
        unused: Set[int],
        compile_body: Callable[[Executable, Store, range, Mapping[int, Set[int]] | None], CompiledPlan],
    ) -> None:
        self._executable, self._store, self._states, self._unused = executable, store, states, unused
        self._compile_body = compile_body

    def compiled(self, index: int) -> DoItem:
        """Return the function that runs the item at `index`, or starts it if it waits."""
        return _COMPILE[type(item := self._executable.plan.items[index])](self, item, index)

    def _filler(self, registers: Sequence[int]) -> Fill:
        return _filler(registers, self._unused)

    def _receive(self, item: Recv, index: int) -> DoItem:
        edge, source, layout = item.edge, item.source, self._executable.layouts[index]
        fill = self._filler(item.gives)
        return lambda run: run.channel.receive(
            run.step, edge + run.frame, source, layout, partial(run.arrived, index, fill)
        )

    def _send(self, item: Send, index: int) -> DoItem:
        edge, destination, take = item.edge, item.destination, taker(item.takes)
        if item.has_count:
            return lambda run: run.channel.send(
                run.step, edge + run.frame, destination, counted_rows(*take(run.registers))
            )
        return lambda run: run.channel.send(run.step, edge + run.frame, destination, take(run.registers))

    def _call(self, item: Call, index: int) -> DoItem:
        program, store, state = self._executable.programs[item.program], self._store, self._states.get(index)
        take, fill = taker(item.takes), self._filler(item.gives)
        changes = changes_of(item)
        # All copies from a GPU start together, and while it still computes. One after the other, each with a wait for
        # the GPU, they took 14 of the 35 ms of a step with thirteen sends.
        copied = self._executable.sent_results(index) if has_own_memory() else ()

        def do(run: Execution) -> None:
            operands = take(run.registers)
            if changes and run.attempt is not None and run.attempt.covers_programs:
                results = call_once(run.attempt, store, program, item, operands, state)
            else:
                results = store.call(program, item.writes, item.reads, operands, state)
            for position in copied:
                results[position].copy_to_host_async()
            fill(run.registers, results)
            if run.recorder.watched is not None:
                written = state.written if state is not None else None
                run.recorder.called((*results, *(written or ())), run.step, run.plan, index)

        return do

    def _read(self, item: Read, index: int) -> DoItem:
        store, keys, fill = self._store, item.keys, self._filler(item.gives)
        if index in self._executable.sent:
            views = repeated_views(store, keys)
            return lambda run: fill(run.registers, views())

        def do(run: Execution) -> None:
            values = store.read_together(keys)
            fill(run.registers, [values[key] for key in keys])

        return do

    def _copy(self, item: Copy, index: int) -> DoItem:
        take, device = item.take, self._executable.devices[item.device]
        fill, awaited = self._filler([item.give]), self._executable.awaited.get(index)

        def do(run: Execution) -> None:
            fill(run.registers, [jax.device_put(run.registers[take], device)])

        def copy(run: Execution, value: Any, earlier: Sequence[Any]) -> None:
            """Copy after the results that the copy must follow are computed, not only dispatched."""
            if not run.is_open:
                return
            copies: Outcome[Sequence[Any]]
            try:
                jax.block_until_ready(earlier)
                copies = [jax.device_put(value, device)]
            except BaseException as error:
                copies = error
            run.arrived(index, fill, copies)

        def do_later(run: Execution) -> None:
            # Waiting for the device here would delay other items that are ready.
            run.submit(partial(copy, run, run.registers[take], [run.registers[register] for register in awaited or ()]))

        return do if awaited is None else do_later

    def _check_ids(self, item: CheckIds, index: int) -> DoItem:
        take, fill = taker(item.takes), self._filler(item.gives)

        def do(run: Execution) -> None:
            values = take(run.registers)
            wait_until_computed(values[:1])
            check_ids(values[0], item.size, item.table, item.line, item.noun)
            fill(run.registers, values)

        return do

    def _use_resource(self, item: UseResource, index: int) -> DoItem:
        store, key, op = self._store, item.key, self._executable.resource_ops[index]
        take, fill = taker(item.takes), self._filler(item.gives)

        def do(run: Execution) -> None:
            held, operands, arrived = store.resource(key), list(take(run.registers)), partial(run.arrived, index, fill)
            run.waiting_ops.add(index)
            if run.attempt is None:
                run.cancel_at_end(held.start(op, operands, arrived))
            else:
                run.cancel_at_end(start_once(run.attempt, key, held, op, operands, arrived, bool(item.gives)))

        return do

    def _branch(self, item: Branch, index: int) -> DoItem:
        take, fill = taker(item.takes), self._filler(item.gives)
        bodies = [
            self._compile_body(self._executable.bodies[body], self._store, range(0), None) for body in item.bodies
        ]

        def do(run: Execution) -> None:
            number, *operands = take(run.registers)
            body = bodies[min(max(int(np.asarray(number)), 0), len(bodies) - 1)]
            run.waiting_ops.add(index)
            child = run.body(body, operands, partial(run.arrived, index, fill))
            run.cancel_at_end(child.cancel)
            child.start()

        return do

    def _loop(self, item: While | Scan, index: int) -> DoItem:
        take, fill, bodies = taker(item.takes), self._filler(item.gives), self._executable.bodies
        after = len(item.takes) - (item.rows if isinstance(item, Scan) else 0)
        carried = range(after - item.carry, after)
        body = self._compile_body(bodies[item.body], self._store, carried, bodies[item.body].follows)
        test = self._compile_body(bodies[item.test], self._store, carried, None) if isinstance(item, While) else None

        def do(run: Execution) -> None:
            run.waiting_ops.add(index)
            loop = Loop(item, take(run.registers), body, test, run, partial(run.arrived, index, fill))
            run.cancel_at_end(loop.cancel)
            loop.start()

        return do


#: Compiles an item of each class.
_COMPILE: Mapping[type[Item], Callable[[ItemCompiler, Any, int], DoItem]] = {
    Recv: ItemCompiler._receive,
    Send: ItemCompiler._send,
    Call: ItemCompiler._call,
    Copy: ItemCompiler._copy,
    CheckIds: ItemCompiler._check_ids,
    Read: ItemCompiler._read,
    UseResource: ItemCompiler._use_resource,
    Branch: ItemCompiler._branch,
    While: ItemCompiler._loop,
    Scan: ItemCompiler._loop,
}
