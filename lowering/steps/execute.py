"""Run the plan of one task in one step: each item when its inputs are ready.

No thread waits for a value. A receive registers a callback with the channel; the thread that delivers the value submits
the items that became ready to a worker thread. An item that waits for a queue or an accumulator does the same. A branch
or loop with such items runs its bodies as separate executions (`loops.py`). The first error ends the execution and
cancels its pending operations; later arrivals are ignored. A value is freed when all items that take it are done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import jax
import numpy as np

from dflow.lowering.queues.channel import Channel, NotConnected, StepId, frame_of_turn
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.state.applied_steps import StepAttempt
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable, gives
from dflow.lowering.steps.line_items import check
from dflow.lowering.steps.loops import PENDING, Loop, OnItem
from dflow.lowering.steps.plan import (
    Branch,
    Call,
    CheckIds,
    Copy,
    Item,
    Plan,
    Read,
    Recv,
    Scan,
    Send,
    UseResource,
    While,
)
from dflow.lowering.steps.recorder import NOWHERE, Recorder
from dflow.lowering.steps.repeated_step import call_once, changes_of, start_once
from dflow.lowering.steps.step_events import ITEM_BEGAN, ITEM_ENDED, ITEM_FAILED
from dflow.lowering.values.host_values import counted_rows, on_device
from dflow.lowering.values.outcome import Outcome, raise_interrupt
from dflow.tracing.errors import InternalError, StepCancelled

#: Results of a plan.
Fetches = tuple[jax.Array, ...]
#: Submits a function to a thread that may block.
Submit = Callable[[Callable[[], None]], object]


class Execution:
    """One run of a plan, from `start` on.

    on_done   called once, from any thread, with the fetches or with the first error
    feeds     the plan's inputs; inputs that an iteration of a loop still lacks are PENDING and come by `feed`
    held      number of calls of `release` that an item waits for, by item
    on_item   called with each item that is done, and its results
    recorder  records when items begin and end
    frame     suffix of edges: the iteration numbers of the loops around, see `channel.frame_of_turn`
    attempt   the attempt at a step of a shared run that this is part of; None for other steps
    """

    #: An execution changes state from its start on; see `StraightRun.is_ahead`.
    is_ahead: Final = False

    def __init__(
        self,
        executable: Executable,
        store: Store,
        channel: Channel,
        step: StepId,
        feeds: Sequence[Any],
        on_done: Callable[[Outcome[Fetches]], None],
        submit: Submit,
        held: Mapping[int, int] = MappingProxyType({}),
        on_item: OnItem | None = None,
        recorder: Recorder = NOWHERE,
        frame: str = "",
        attempt: StepAttempt | None = None,
    ) -> None:
        plan = executable.plan
        if len(feeds) != len(plan.feeds):
            raise InternalError(f"the plan of {plan.task} takes {len(plan.feeds)} feeds but was given {len(feeds)}")
        self._executable, self._store, self._channel = executable, store, channel
        self._step, self._on_done, self._submit = step, on_done, submit
        self._frame, self.attempt = frame, attempt
        self._slots: list[Any] = [None] * plan.slots
        for slot, value in executable.scalars:
            self._slots[slot] = value
        pending = []
        for slot, value in zip(plan.feeds, feeds, strict=True):
            self._slots[slot] = value
            if value is PENDING and slot not in pending:
                pending.append(slot)
        self._lock = threading.Lock()
        self._on_item, self._recorder = on_item, recorder
        self._waiting, self._uses = list(executable.waiting), list(executable.uses)
        self._left = len(plan.items)
        self._has_started = False
        for index, count in held.items():
            self._waiting[index] += count
        for slot in pending:
            self._wait_for_feed(slot, 1)
        self._ended = False
        self._outcome: Outcome[Fetches] | None = None
        #: Cancels the operation that an item waits for, by item; called when the execution fails.
        self._cancels: dict[int, Cancel] = {}

    def _wait_for_feed(self, slot: int, by: int) -> list[int]:
        """Add `by` to the missing inputs of the items that take a pending feed; return the items that became ready."""
        self._left += by if slot in self._executable.fetched else 0
        ready = []
        for index in self._executable.takers.get(slot, ()):
            self._waiting[index] += by
            if self._waiting[index] == 0:
                ready.append(index)
        return ready

    def start(self) -> None:
        """Run the items that are ready, on this thread. Does nothing if it was cancelled before."""
        with self._lock:
            ready = [index for index in self._executable.at_once if self._waiting[index] == 0]
            self._has_started = True
            complete = self._left == 0
        if complete:
            self._complete()
        self._run(ready)

    @property
    def is_blocked(self) -> bool:
        """Whether it may wait for a queue or an accumulator, also in a branch or a loop."""
        return not self._ended

    def feed(self, place: int, value: Any) -> None:
        """Supply the value of the feed at index `place`, which was PENDING."""
        slot = self._executable.plan.feeds[place]
        with self._lock:
            self._slots[slot] = value
            ready = self._wait_for_feed(slot, -1)
            has_started, complete = self._has_started, self._left == 0
        if has_started:
            self._went_on(ready, complete)

    def release(self, item: int) -> None:
        """Notify that one of the items that `item` is held for is done."""
        with self._lock:
            self._waiting[item] -= 1
            ready = [item] if self._waiting[item] == 0 else []
            has_started = self._has_started
        if has_started:
            self._went_on(ready, False)

    def _went_on(self, ready: list[int], complete: bool) -> None:
        """Submit items that became ready after `start`, which runs the earlier ones itself."""
        if complete:
            self._complete()
        elif ready and not self._ended:
            self._submit(lambda: self._run(ready))

    def _complete(self) -> None:
        self._end(on_device(self._slots[slot] for slot in self._executable.plan.fetches))

    def cancel(self, error: BaseException) -> None:
        """End with `error` unless it has ended."""
        self._end(error)

    def _run(self, ready: Sequence[int]) -> None:
        queue = deque(ready)
        while queue and not self._ended:
            index = queue.popleft()
            try:
                plan = self._executable.plan
                self._recorder.append((self._recorder.clock(), ITEM_BEGAN, self._step, plan, index))
                item = plan.items[index]
                if _PERFORM[type(item)](self, item, index):
                    queue.extend(self._done(index))
            except BaseException as error:
                self._fail(index, error)

    def _receive(self, item: Recv, index: int) -> bool:
        layout, deliver = self._executable.layouts[index], partial(self._arrived, index, item.gives)
        self._channel.receive(self._step, item.edge + self._frame, item.source, layout, deliver)
        return False

    def _send(self, item: Send, index: int) -> bool:
        values: Sequence[Any] = [self._slots[slot] for slot in item.takes]
        if item.has_count:
            values = counted_rows(*values)
        try:
            self._channel.send(self._step, item.edge + self._frame, item.destination, values)
        except NotConnected as needed:
            needed.then(partial(self._connected, index))
            return False
        return True

    def _connected(self, index: int, error: Exception | None) -> None:
        """Run a send again whose destination had to be connected first."""
        try:
            if error is not None:
                raise error
            if not self._ended:
                self._submit(lambda: self._run([index]))
        except Exception as failure:
            self._fail(index, failure)

    def _call(self, item: Call, index: int) -> bool:
        operands = [self._slots[slot] for slot in item.takes]
        program, state = self._executable.programs[item.program], None
        if item.writes or item.reads:
            state = self._store.step_state(program, item.writes, item.reads)
        if self.attempt is not None and self.attempt.covers_programs and changes_of(item):
            results = call_once(self.attempt, self._store, program, item, operands, state)
        else:
            results = self._store.call(program, item.writes, item.reads, operands, state)
        self._fill(item.gives, results)
        if self._recorder.watched is not None:
            written = state.written if state is not None else None
            self._recorder.called((*results, *(written or ())), self._step, self._executable.plan, index)
        return True

    def _copy(self, item: Copy, index: int) -> bool:
        if index in self._executable.awaited:
            # Waiting for the device here would delay other items that are ready.
            self._submit(partial(self._copy_after, index, item))
            return False
        self._slots[item.give] = self._copied(item)
        return True

    def _check_ids(self, item: CheckIds, index: int) -> bool:
        check(item, self._slots)
        return True

    def _read(self, item: Read, index: int) -> bool:
        if index in self._executable.sent:
            self._fill(item.gives, self._store.views(item.keys))
        else:
            values = self._store.snapshot(item.keys)
            self._fill(item.gives, [values[key] for key in item.keys])
        return True

    def _copied(self, item: Copy) -> jax.Array:
        copy: jax.Array = jax.device_put(self._slots[item.take], self._executable.devices[item.device])
        return copy

    def _copy_after(self, index: int, item: Copy) -> None:
        """Copy after the results that the copy must follow are computed, not only dispatched."""
        if self._ended:
            return
        try:
            jax.block_until_ready([self._slots[slot] for slot in self._executable.awaited[index]])
            self._slots[item.give] = self._copied(item)
            self._run(self._done(index))
        except BaseException as error:
            self._fail(index, error)

    def _fill(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self._slots[slot] = value

    def _use_resource(self, item: UseResource, index: int) -> bool:
        operands = [self._slots[slot] for slot in item.takes]
        held, op = self._store.resource(item.key), self._executable.resource_ops[index]
        end = partial(self._arrived, index, item.gives)
        if self.attempt is None:
            self._cancel_at_end(index, held.start(op, operands, end))
        else:
            cancel = start_once(self.attempt, item.key, held, op, operands, end, bool(item.gives))
            self._cancel_at_end(index, cancel)
        return False

    def _branch(self, item: Branch, index: int) -> bool:
        number, *operands = [self._slots[slot] for slot in item.takes]
        body = item.bodies[min(max(int(np.asarray(number)), 0), len(item.bodies) - 1)]
        child = self._run_of(body, operands, partial(self._arrived, index, item.gives))
        self._cancel_at_end(index, child.cancel)
        child.start()
        return False

    def _loop(self, item: While | Scan, index: int) -> bool:
        values = [self._slots[slot] for slot in item.takes]
        end = partial(self._arrived, index, item.gives)
        loop = Loop(item, values, self._executable.bodies, self._run_of, end, self._submit)
        self._cancel_at_end(index, loop.cancel)
        loop.start()
        return False

    def _run_of(
        self,
        body: int,
        feeds: Sequence[Any],
        on_done: Callable[[Outcome[Fetches]], None],
        turn: int | None = None,
        held: Mapping[int, int] = MappingProxyType({}),
        on_item: OnItem | None = None,
    ) -> Execution:
        around = self._store, self._channel, self._step
        frame = self._frame if turn is None else frame_of_turn(self._frame, turn)
        plan, recorder = self._executable.bodies[body], self._recorder
        return Execution(plan, *around, feeds, on_done, self._submit, held, on_item, recorder, frame, self.attempt)

    def _cancel_at_end(self, index: int, cancel: Cancel) -> None:
        with self._lock:
            self._cancels[index] = cancel
            outcome = self._outcome
        if isinstance(outcome, BaseException):
            cancel(outcome)

    def _arrived(self, index: int, slots: Sequence[int], values: Outcome[Sequence[Any]]) -> None:
        """Continue after an item that waited. This runs on the thread that delivers its results."""
        if isinstance(values, BaseException):
            self._fail(index, values)
            return
        try:
            self._fill(slots, values)
            ready = self._done(index)
            # After the end there may be no worker left to submit to.
            if ready and not self._ended:
                self._submit(lambda: self._run(ready))
        except BaseException as error:
            self._fail(index, failure_of_arrival(error))
            raise_interrupt(error)

    def _fail(self, index: int, error: BaseException) -> None:
        """End with the error of an item, and add its name to it; a body's item is named before the branch or loop.

        An interrupt that comes after the end is raised.
        """
        if not self._ended:
            note_failure(self._recorder, self._step, self._executable.plan, index, error)
        if not self._end(error):
            raise_interrupt(error)

    def _done(self, index: int) -> list[int]:
        """Count an item as done; return the items that became ready."""
        self._recorder.append((self._recorder.clock(), ITEM_ENDED, self._step, self._executable.plan, index))
        if self._on_item is not None:
            # Before it is counted, so that the last item is reported before the end of the execution.
            self._on_item(index, [(slot, self._slots[slot]) for slot in gives(self._executable.plan.items[index])])
        ready = []
        with self._lock:
            for dependent in self._executable.dependents[index]:
                self._waiting[dependent] -= 1
                if self._waiting[dependent] == 0:
                    ready.append(dependent)
            for slot in self._executable.lets_go[index]:
                self._uses[slot] -= 1
                if self._uses[slot] == 0:
                    self._slots[slot] = None
            self._left -= 1
            complete = self._left == 0
        if complete:
            self._complete()
        return ready

    def _end(self, outcome: Outcome[Fetches]) -> bool:
        """End the execution, and return True; return False if it had ended."""
        with self._lock:
            if self._ended:
                return False
            self._ended, self._outcome = True, outcome
            cancels = list(self._cancels.values())
        if isinstance(outcome, BaseException):
            for cancel in cancels:
                cancel(outcome)
        self._on_done(outcome)
        return True


def failure_of_arrival(error: BaseException) -> BaseException:
    """Return the error of a step, from one raised while the producer's thread delivered what the step waited for.

    The step must fail there, or it would hang. An interrupt is for that thread, and cancels the step.
    """
    if isinstance(error, Exception):
        return error
    return StepCancelled("the thread that brought what this step waited for was interrupted")


def note_failure(recorder: Recorder, step: StepId, plan: Plan, index: int, error: BaseException) -> None:
    """Record that an item of a plan failed, and add the item's name to its error."""
    recorder.note(ITEM_FAILED, step, plan, (index, type(error).__name__))
    if isinstance(error, Exception) and plan.names:
        error.add_note(f"in {plan.names[index]}")


#: The method that runs an item, by class. It returns False if the item is done later, when its callback is called.
_PERFORM: Mapping[type[Item], Callable[[Execution, Any, int], bool]] = {
    Recv: Execution._receive,
    Send: Execution._send,
    Call: Execution._call,
    Copy: Execution._copy,
    CheckIds: Execution._check_ids,
    Read: Execution._read,
    UseResource: Execution._use_resource,
    Branch: Execution._branch,
    While: Execution._loop,
    Scan: Execution._loop,
}
