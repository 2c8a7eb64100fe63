"""Runs one task's plan of a step: each item when what it needs is there.

No thread waits for a value: a receive leaves a callback with the channel, and whoever delivers the value has the
items that became ready run by a worker; an item that waits for a queue or an accumulator does the
same, and a branch or loop with such items runs its bodies as executions of their own. The first error ends the
execution and what it waits for; what arrives later is ignored.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.channel import Channel, StepId
from dflow.lowering.control import Turns, turns_of
from dflow.lowering.devices import device_named
from dflow.lowering.plan import Branch, Call, Copy, Item, Plan, Recv, Scalar, Scan, Send, UseResource, While
from dflow.lowering.program import Program
from dflow.lowering.resource_use import ResourceUse
from dflow.lowering.store import Store
from dflow.lowering.waiters import Cancel
from dflow.tracing.errors import InternalError
from dflow.tracing.types import parse_dtype

#: What an execution ends with: the fetches, or the error.
Outcome = tuple[jax.Array, ...] | BaseException
#: Runs a function soon, on some thread that may block.
Submit = Callable[[Callable[[], None]], object]


class Schedule:
    """What waits for what in a plan; worked out once per plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.bodies = tuple(Schedule(body) for body in plan.bodies)
        self.scalars = tuple((scalar.slot, _number(scalar)) for scalar in plan.scalars)
        self.devices = {item.device: device_named(item.device) for item in plan.items if isinstance(item, Copy)}
        producers = {slot: index for index, item in enumerate(plan.items) for slot in gives(item)}
        needs = [_needs(item, producers) for item in plan.items]
        self.waiting = [len(need) for need in needs]
        self.dependents: list[list[int]] = [[] for _ in plan.items]
        for index, need in enumerate(needs):
            for producer in need:
                self.dependents[producer].append(index)


def takes(item: Item) -> tuple[int, ...]:
    """The slots an item needs filled."""
    match item:
        case Send() | Copy():
            return (item.take,)
        case Recv():
            return ()
    return item.takes


def gives(item: Item) -> tuple[int, ...]:
    """The slots an item fills."""
    match item:
        case Send():
            return ()
        case Recv() | Copy():
            return (item.give,)
    return item.gives


def _number(scalar: Scalar) -> jax.Array:
    return jnp.asarray(np.frombuffer(scalar.data, parse_dtype(scalar.dtype))[0])


def _needs(item: Item, producers: dict[int, int]) -> set[int]:
    return {producers[slot] for slot in takes(item) if slot in producers} | set(item.after)


class Execution:
    """One run of a plan, from `start` on.

    `on_done` is called once, from any thread, with the fetches or with the first error.
    """

    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[Program],
        store: Store,
        channel: Channel,
        step: StepId,
        feeds: Sequence[Any],
        on_done: Callable[[Outcome], None],
        submit: Submit,
    ) -> None:
        plan = schedule.plan
        if len(feeds) != len(plan.feeds):
            raise InternalError(f"the plan of {plan.task} takes {len(plan.feeds)} feeds but was given {len(feeds)}")
        self._schedule, self._programs, self._store, self._channel = schedule, programs, store, channel
        self._step, self._on_done, self._submit = step, on_done, submit
        self._slots: list[Any] = [None] * plan.slots
        for slot, value in (*schedule.scalars, *zip(plan.feeds, feeds, strict=True)):
            self._slots[slot] = value
        self._lock = threading.Lock()
        self._waiting = list(schedule.waiting)
        self._left = len(plan.items)
        self._ended = False
        self._outcome: Outcome | None = None
        #: By item: ends what it waits for, when the execution ends before it.
        self._cancels: dict[int, Cancel] = {}

    def start(self) -> None:
        """Run what can run, on this thread; receives first, so that values find their waiter."""
        ready = [index for index, count in enumerate(self._waiting) if count == 0]
        ready.sort(key=lambda index: not isinstance(self._schedule.plan.items[index], Recv))
        if not self._schedule.plan.items:
            self._end(tuple(self._slots[slot] for slot in self._schedule.plan.fetches))
        self._run(ready)

    def cancel(self, error: BaseException) -> None:
        """End with `error` unless it has ended."""
        self._end(error)

    def _run(self, ready: Sequence[int]) -> None:
        queue = deque(ready)
        while queue and not self._ended:
            index = queue.popleft()
            try:
                if self._perform(self._schedule.plan.items[index], index):
                    queue.extend(self._done(index))
            except BaseException as error:
                self._end(error)

    def _perform(self, item: Item, index: int) -> bool:
        """Do an item; false when it will be done later, by a delivery."""
        match item:
            case Recv():
                self._channel.receive(self._step, item.edge, item.source, partial(self._received, index, item))
                return False
            case Send():
                self._channel.send(self._step, item.edge, item.destination, self._slots[item.take])
            case Call():
                operands = [self._slots[slot] for slot in item.takes]
                results = self._store.call(self._programs[item.program], item.writes, item.reads, operands)
                self._fill(item.gives, results)
            case Copy():
                self._slots[item.give] = jax.device_put(self._slots[item.take], self._schedule.devices[item.device])
            case UseResource():
                self._use_resource(item, index)
                return False
            case Branch() | While() | Scan():
                self._turn(index, item.gives, turns_of(item, [self._slots[slot] for slot in item.takes]), None)
                return False
        return True

    def _fill(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self._slots[slot] = value

    def _use_resource(self, item: UseResource, index: int) -> None:
        use = ResourceUse(item.op, item.count, item.timeout_s, item.cancel_pending, item.line)
        operands = [self._slots[slot] for slot in item.takes]
        held = self._store.resource(item.key)
        self._cancel_at_end(index, held.start(use, operands, lambda results: self._arrived(index, item.gives, results)))

    def _turn(self, index: int, given: Sequence[int], turns: Turns, results: Sequence[Any] | None) -> None:
        """Start the next body of a branch or loop, or end it."""
        try:
            body, feeds = next(turns) if results is None else turns.send(results)
        except StopIteration as stop:
            self._arrived(index, given, stop.value)
            return

        def on_done(outcome: Outcome) -> None:
            if isinstance(outcome, BaseException):
                self._end(outcome)
            elif not self._ended:
                # Not from here: turn within turn, the stack would overflow.
                self._submit(lambda: self._guarded(lambda: self._turn(index, given, turns, outcome)))

        schedule, submit = self._schedule.bodies[body], self._submit
        child = Execution(schedule, self._programs, self._store, self._channel, self._step, feeds, on_done, submit)
        self._cancel_at_end(index, child.cancel)
        child.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._end(error)

    def _cancel_at_end(self, index: int, cancel: Cancel) -> None:
        with self._lock:
            self._cancels[index] = cancel
            outcome = self._outcome
        if isinstance(outcome, BaseException):
            cancel(outcome)

    def _received(self, index: int, item: Recv, value: jax.Array | BaseException) -> None:
        self._arrived(index, (item.give,), value if isinstance(value, BaseException) else (value,))

    def _arrived(self, index: int, slots: Sequence[int], values: Sequence[Any] | BaseException) -> None:
        """What an item waited for is there, on whatever thread brings it."""
        if isinstance(values, BaseException):
            self._end(values)
            return
        try:
            self._fill(slots, values)
            ready = self._done(index)
            # After the end there may be no worker left to submit to.
            if ready and not self._ended:
                self._submit(lambda: self._run(ready))
        except Exception as error:
            # Whoever brought it has no part in this step, which would wait for ever.
            self._end(error)

    def _done(self, index: int) -> list[int]:
        """Count an item as done; the items that may run now."""
        ready = []
        with self._lock:
            for dependent in self._schedule.dependents[index]:
                self._waiting[dependent] -= 1
                if self._waiting[dependent] == 0:
                    ready.append(dependent)
            self._left -= 1
            complete = self._left == 0
        if complete:
            self._end(tuple(self._slots[slot] for slot in self._schedule.plan.fetches))
        return ready

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended, self._outcome = True, outcome
            cancels = list(self._cancels.values())
        if isinstance(outcome, BaseException):
            for cancel in cancels:
                cancel(outcome)
        self._on_done(outcome)
