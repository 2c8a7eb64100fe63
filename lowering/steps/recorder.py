"""The flight recorder of a task: the newest events of its steps, recorded at a cost too small to slow a step.

An event is stored as a tuple of objects at hand; names and texts are looked up when events are read. The ring is a
bounded deque. `append` to it is atomic in CPython, so any thread may record without a lock; the oldest event is freed
when the ring is full. The events of items and values are appended by their threads, since a call of a Python function
for each would be a tenth of all calls of a small step. No other part of dflow bases decisions on the events.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final

import jax

from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.plan import Plan, Recv, Send
from dflow.lowering.steps.step_events import COMPUTED, RECEIVED, SENT, WAIT_EXPIRED, Event

#: Number of events that a recorder keeps by default.
EVENTS_KEPT = 10_000
#: An error's text is cut to at most this number of characters.
MOST_TEXT = 1000

#: An event as it is stored; see `Recorder.append`.
Noted = tuple[Any, ...]
#: The results of a call, its step, its plan and its index there.
Called = tuple[Sequence[Any], StepId, Plan, int]


class Recorder:
    """The newest `capacity` events of one task. `clock` returns ns since some fixed moment."""

    def __init__(self, capacity: int = EVENTS_KEPT, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self._capacity = capacity
        self._ring: deque[Noted] = deque(maxlen=capacity)
        #: Records an event, made as `note` does: its time by `clock`, what happened, the step, subject and detail; then
        #: for a value size and beginning. To be looked up for each event.
        self.append: Callable[[Noted], None] = self._ring.append
        #: Queue for the numbers of the calls whose completion is recorded; None while none is.
        self.watched: SimpleQueue[int | None] | None = None
        #: The calls that are not seen to be computed, by number.
        self._computing: dict[int, Called] = {}
        self._numbers = itertools.count()

    def note(
        self, what: str, step: StepId | None = None, subject: Any = "", detail: Any = "", size: int = 0, began: int = 0
    ) -> int:
        """Record an event and return its time, in ns.

        event of   subject         detail
        an item    its plan        its index in the plan, or the index and the name of its error's class
        a value    its edge        the other task
        all else   the other task  a text
        """
        at_ns = self.clock()
        self.append((at_ns, what, step, subject, detail, size, began))
        return at_ns

    def keep(self, events: int) -> None:
        """Keep `events` events from now on, but at least the initial capacity.

        Events that other threads record during this call may be missed.
        """
        self._ring = deque(self._ring, maxlen=max(events, self._capacity))
        if self.watched is None:
            self.append = self._ring.append

    def watch(self) -> None:
        """Record from now on when calls are computed.

        A separate thread waits for them in the order of dispatch. It may see the end of a call late, since it needs the
        interpreter's lock. So `append` first looks for calls that are computed: their end is recorded before any event
        that comes after it.
        """
        self.unwatch()
        # A call that was dispatched as the last `unwatch` ended the thread was never recorded.
        self._computing.clear()
        self.watched = SimpleQueue()
        # Not a condition for each event, which would cost all the steps that are not traced.
        self.append = self._look_and_append
        threading.Thread(target=self._wait_for_all, args=(self.watched,), name="dflow computed", daemon=True).start()

    def unwatch(self) -> None:
        """Stop recording when calls are computed, except those dispatched before."""
        watched, self.watched = self.watched, None
        if watched is not None:
            self.append = self._ring.append
            watched.put(None)

    def called(self, results: Sequence[Any], step: StepId, plan: Plan, index: int) -> None:
        """Record when `results` are computed: all that a call returned, the new values of variables included.

        Called right after the dispatch of a call, and only while `watched` is not None.
        """
        watched, number = self.watched, next(self._numbers)
        if watched is not None:
            self._computing[number] = results, step, plan, index
            if not self._look(number):
                watched.put(number)

    def _look_and_append(self, noted: Noted) -> None:
        for number in tuple(self._computing):
            self._look(number)
        self._ring.append((self.clock(), *noted[1:]))

    def _look(self, number: int) -> bool:
        """Record that a call is computed if it is; return whether it is. Any thread may call this."""
        called = self._computing.get(number)
        if called is None:
            return True
        try:
            # JAX's arrays of PRNG keys cannot tell.
            is_computed = all(hasattr(value, "is_ready") and value.is_ready() for value in called[0])
        except RuntimeError:  # a value was donated to another call
            return False
        if is_computed:
            self._computed(number)
        return is_computed

    def _computed(self, number: int) -> None:
        called = self._computing.pop(number, None)
        if called is not None:  # else another thread has recorded it
            self._ring.append((self.clock(), COMPUTED, *called[1:]))

    def _wait_for_all(self, watched: SimpleQueue[int | None]) -> None:
        while (number := watched.get()) is not None:
            called = self._computing.get(number)
            if called is not None:
                # Results were donated to another call, or the call failed, which is reported elsewhere.
                with contextlib.suppress(Exception):
                    jax.block_until_ready(called[0])
                self._computed(number)

    @property
    def is_full(self) -> bool:
        """Whether the next event replaces the oldest one."""
        return len(self._ring) == self._ring.maxlen

    def events(self, since_ns: int = 0) -> list[Event]:
        """Return the kept events from `since_ns` on, oldest first."""
        return [_read(noted) for noted in self._ring.copy() if noted[0] >= since_ns]


def described_end(error: BaseException) -> str:
    """Return a short text of the error that ended a step."""
    # A text, since the error would keep its traceback, and so the values of the step, in memory.
    return f"{type(error).__name__}: {error}"[:MOST_TEXT]


#: A recorder that keeps no event.
NOWHERE: Final = Recorder(0, lambda: 0)


def _read(noted: Noted) -> Event:
    at_ns, what, step, subject, detail, *transfer = noted
    origin, number = (step.origin, step.number) if step is not None else ("", 0)
    if isinstance(subject, Plan):
        index, text = detail if isinstance(detail, tuple) else (detail, "")
        item = subject.items[index]
        # An item's name in errors: the node, then the user's line on a separate line.
        name, _, line = (subject.names[index] if subject.names else "").partition("\n")
        line = line.strip().removeprefix("at ")
        # Sends and receives are named by their edge, like the events of the value.
        name = str(getattr(item, "edge", name))
        peer = str(getattr(item, "source", "") or getattr(item, "destination", ""))
        kind = type(item).__name__
        values = len(item.takes) if isinstance(item, Send) else len(item.gives) if isinstance(item, Recv) else 0
        return Event(at_ns, what, origin, number, kind, name, line, peer, values=values, number=index, text=text)
    if what in _OF_VALUES:
        size, began = transfer
        return Event(at_ns, what, origin, number, name=subject, peer=detail, size_bytes=size, began_ns=began)
    return Event(at_ns, what, origin, number, peer=subject, text=detail)


_OF_VALUES = (SENT, RECEIVED, WAIT_EXPIRED)
