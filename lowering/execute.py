"""Runs one task's plan of a step: each item when what it needs is there.

No thread waits for a value: a receive leaves a callback with the channel, and whoever delivers the value has the
items that became ready run by a worker. The first error ends the execution; what arrives later is ignored.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dflow.lowering.channel import Channel, StepId
from dflow.lowering.plan import Call, Item, Plan, Recv, Send
from dflow.lowering.program import Program
from dflow.lowering.store import Store
from dflow.tracing.errors import InternalError

#: What an execution ends with: the fetches, or the error.
Outcome = tuple[jax.Array, ...] | BaseException
#: Runs a function soon, on some thread that may block.
Submit = Callable[[Callable[[], None]], object]


class Schedule:
    """What waits for what in a plan; worked out once per plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        producers = {slot: index for index, item in enumerate(plan.items) for slot in gives(item)}
        needs = [_needs(item, producers) for item in plan.items]
        self.waiting = [len(need) for need in needs]
        self.dependents: list[list[int]] = [[] for _ in plan.items]
        for index, need in enumerate(needs):
            for producer in need:
                self.dependents[producer].append(index)


def takes(item: Item) -> tuple[int, ...]:
    """The slots an item needs filled."""
    return item.takes if isinstance(item, Call) else (item.take,) if isinstance(item, Send) else ()


def gives(item: Item) -> tuple[int, ...]:
    """The slots an item fills."""
    return item.gives if isinstance(item, Call) else (item.give,) if isinstance(item, Recv) else ()


def _needs(item: Item, producers: dict[int, int]) -> set[int]:
    return {producers[slot] for slot in takes(item) if slot in producers} | set(item.after)


class Execution:
    """One run of a plan. Made by `execute`."""

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
        for slot, value in zip(plan.feeds, feeds, strict=True):
            self._slots[slot] = value
        self._lock = threading.Lock()
        self._waiting = list(schedule.waiting)
        self._left = len(plan.items)
        self._ended = False

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
                self._channel.receive(
                    self._step, item.edge, item.source, lambda value: self._received(index, item, value)
                )
                return False
            case Send():
                self._channel.send(self._step, item.edge, item.destination, self._slots[item.take])
            case Call():
                operands = [self._slots[slot] for slot in item.takes]
                results = self._store.call(self._programs[item.program], item.writes, item.reads, operands)
                for slot, value in zip(item.gives, results, strict=True):
                    self._slots[slot] = value
        return True

    def _received(self, index: int, item: Recv, value: jax.Array | BaseException) -> None:
        if isinstance(value, BaseException):
            self._end(value)
            return
        self._slots[item.give] = value
        ready = self._done(index)
        # After the end there may be no worker left to submit to.
        if ready and not self._ended:
            self._submit(lambda: self._run(ready))

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
            self._ended = True
        self._on_done(outcome)


def execute(
    schedule: Schedule,
    programs: Sequence[Program],
    store: Store,
    channel: Channel,
    step: StepId,
    feeds: Sequence[Any],
    on_done: Callable[[Outcome], None],
    submit: Submit,
) -> Execution:
    """Start a plan; `on_done` is called once, from any thread, with the fetches or with the first error."""
    execution = Execution(schedule, programs, store, channel, step, feeds, on_done, submit)
    execution.start()
    return execution
