"""What a task did last: the newest events of its steps, kept at a cost that no step notices.

An event is noted as a tuple of what is at hand; names and texts are looked up by whoever reads. A bounded deque is the
ring: to append to it is one operation of the interpreter, so that any thread may note without a lock, and what it does
not hold any more it lets go of. Nothing is decided by what is noted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, Protocol

import jax
import msgspec

from dflow.lowering.channel import StepId
from dflow.lowering.plan import Plan

#: How many events a recorder keeps.
EVENTS_KEPT = 10_000
#: Characters of an error that are kept.
MOST_TEXT = 1000

# A step, at the task that started it; and a task's part of a step.
STEP_BEGAN: Final = "step began"
STEP_ENDED: Final = "step ended"
PART_BEGAN: Final = "part began"
PART_ENDED: Final = "part ended"
# An item of a plan, which may be a wait: for a value, a queue, a branch or a loop.
ITEM_BEGAN: Final = "item began"
ITEM_ENDED: Final = "item ended"
ITEM_FAILED: Final = "item failed"
# What an XLA call gives is there; noted while somebody looks closely.
COMPUTED: Final = "computed"
# A value, with its peer and size.
SENT: Final = "sent"
RECEIVED: Final = "received"
WAIT_EXPIRED: Final = "wait expired"
# The surroundings.
CONNECTED: Final = "connected"
CONNECTION_LOST: Final = "connection lost"
ROSTER_CHANGED: Final = "roster changed"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened on a task.

    `at_ns`       when, by the task's own clock, which only goes forward
    `what`        one of the constants above
    `origin`      the task that started the step that it was part of, with the `step`'s number; empty without one
    `kind`        of an item: its class, such as Call
    `name`        of an item: its node, or the edge of a send or a receive; of a value: its edge
    `line`        of an item: the user's
    `peer`        the other task
    `size_bytes`  of a value
    `began_ns`    when what ended at `at_ns` began, where that has no event of its own, else 0
    `number`      of an item: its place in its plan; an item of a loop's body has as many runs as turns
    `text`        anything else, such as an error
    """

    at_ns: int
    what: str
    origin: str = ""
    step: int = 0
    kind: str = ""
    name: str = ""
    line: str = ""
    peer: str = ""
    size_bytes: int = 0
    began_ns: int = 0
    number: int = 0
    text: str = ""


class Note(Protocol):
    """See `Recorder.note`."""

    def __call__(
        self, what: str, step: StepId | None = None, subject: Any = "", detail: Any = "", size: int = 0, began: int = 0
    ) -> int:
        """Keep an event."""
        ...


#: What a call gave, in which step, and its place in the plan.
Called = tuple[Sequence[Any], StepId, Plan, int]


class Recorder:
    """The newest `capacity` events of one task; `clock` gives ns since any moment."""

    def __init__(self, capacity: int = EVENTS_KEPT, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self._capacity = capacity
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        #: Where to put calls while it is noted when they are computed.
        self.watched: SimpleQueue[Called | None] | None = None

    def note(
        self, what: str, step: StepId | None = None, subject: Any = "", detail: Any = "", size: int = 0, began: int = 0
    ) -> int:
        """Keep an event; when it was, in ns.

        Of an item, `subject` is its plan and `detail` its place there, or that with the class of the error it failed
        by; of a value, they are its edge and the other task; of all else, the other task and a text.
        """
        at_ns = self.clock()
        self._ring.append((at_ns, what, step, subject, detail, size, began))
        return at_ns

    def keep(self, events: int) -> None:
        """Keep so many events from now on, or as many as at first when that is more.

        What is noted by others at this very moment may be missed.
        """
        self._ring = deque(self._ring, maxlen=max(events, self._capacity))

    def watch(self) -> None:
        """From now on, note when calls are computed; a thread of its own waits for them, in the order of asking."""
        self.unwatch()
        self.watched = SimpleQueue()
        threading.Thread(target=self._wait_for_all, args=(self.watched,), name="dflow computed", daemon=True).start()

    def unwatch(self) -> None:
        """Let what was called last be noted, and no more."""
        watched, self.watched = self.watched, None
        if watched is not None:
            watched.put(None)

    def _wait_for_all(self, watched: SimpleQueue[Called | None]) -> None:
        while (called := watched.get()) is not None:
            results, step, plan, index = called
            # Given to another call by now, or failed: others tell of it.
            with contextlib.suppress(Exception):
                jax.block_until_ready(results)
            self.note(COMPUTED, step, plan, index)

    @property
    def is_full(self) -> bool:
        """Whether the oldest event gives way to the next."""
        return len(self._ring) == self._ring.maxlen

    def events(self, since_ns: int = 0) -> list[Event]:
        """What is kept and was not before `since_ns`, oldest first."""
        return [_read(noted) for noted in self._ring.copy() if noted[0] >= since_ns]


def described_end(outcome: object) -> str:
    """What to note of how something ended: the error, in short, or nothing. Errors themselves hold on to too much."""
    return f"{type(outcome).__name__}: {outcome}"[:MOST_TEXT] if isinstance(outcome, BaseException) else ""


def not_noted(
    what: str, step: StepId | None = None, subject: Any = "", detail: Any = "", size: int = 0, began: int = 0
) -> int:
    """Stands for `Recorder.note` where nobody looks."""
    return 0


class _Nowhere(Recorder):
    """Keeps nothing."""

    note = staticmethod(not_noted)


NOWHERE: Final = _Nowhere()


def _read(noted: tuple[Any, ...]) -> Event:
    at_ns, what, step, subject, detail, size, began = noted
    origin, number = step if step is not None else ("", 0)
    if isinstance(subject, Plan):
        index, text = detail if isinstance(detail, tuple) else (detail, "")
        item = subject.items[index]
        # What the errors of a plan say of its items: the node, then the user's line on a line of its own.
        name, _, line = (subject.names[index] if subject.names else "").partition("\n")
        line = line.strip().removeprefix("at ")
        # Sends and receives by what they carry, as the events of the value itself.
        name = str(getattr(item, "edge", name))
        return Event(at_ns, what, origin, number, type(item).__name__, name, line, _peer(item), number=index, text=text)
    if what in _OF_VALUES:
        return Event(at_ns, what, origin, number, name=subject, peer=detail, size_bytes=size, began_ns=began)
    return Event(at_ns, what, origin, number, peer=subject, text=detail)


def _peer(item: Any) -> str:
    return str(getattr(item, "source", "") or getattr(item, "destination", ""))


_OF_VALUES = (SENT, RECEIVED, WAIT_EXPIRED)
