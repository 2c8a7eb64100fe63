"""The threads that read a process's connections: one for all of them, and another for a connection that must wait.

Why: with a reader thread for each connection, a few busy connections spend as much time on switching the interpreter's
lock as on the messages. So one thread at a time is the *leader*: it polls all connections, and reads those with data.
When it must wait while reading one (for the rest of a large payload, or for a value still being computed), it hands
over the lead to another thread, and keeps that connection for itself until the read is done.

Invariants:

- At most one thread reads a source: the leader, or the thread that handed over the lead while reading it.
- A source is read until `remove`, which must come before its file descriptor is closed.
- While there are sources, there are threads: the leader, at most one that waits to lead, and any that handed over the
  lead and are still reading.
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from dflow.distributed.transport.exchange import LOGGER, become_reader
from dflow.distributed.transport.send_queue import flush
from dflow.lowering.values.computed import before_waiting

_EVENTS_AT_A_TIME = 64


class Source(Protocol):
    """A connection to read."""

    def read(self) -> bool:
        """Read the available data; return whether it ends in the middle of a frame.

        It may wait only after a call of `give_way`. An exception is logged, and ends the reading of this source.
        """
        ...

    def stalled(self) -> None:
        """Handle a time-out: no byte of a begun frame has arrived for the reactor's `stall_timeout_s`."""
        ...


@dataclass(eq=False)
class _Place:
    """A registered source; `is_waited_for` while a thread that handed over the lead is reading it."""

    file: int
    source: Source
    is_waited_for: bool = False


class _Leads(threading.local):
    reactor: Reactor | None = None


_LEADS = _Leads()


def give_way() -> None:
    """Prepare this thread for waiting: send the frames that it has gathered, and hand over the lead if it has it."""
    flush()
    if _LEADS.reactor is not None:
        _LEADS.reactor.hand_over()


class Reactor:
    """Reads sources; `stall_timeout_s` is the longest time without a byte in the middle of a frame."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._leading = threading.Lock()
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._threads = 0
        self._waiting = 0
        #: The source that the leader is reading.
        self._at: _Place | None = None
        #: For each source in the middle of a frame, the monotonic time at which it counts as stalled.
        self._stalls_at: dict[_Place, float] = {}

    @property
    def threads(self) -> int:
        """Number of reader threads."""
        return self._threads

    def add(self, file: int, source: Source) -> None:
        """Read `source` whenever `file` has data, until `remove`; raises RuntimeError if no thread can be started."""
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._epoll.register(self._wake, select.EPOLLIN)
            if not self._threads:
                self._start()
            self._places[file] = _Place(file, source)
            self._epoll.register(file, select.EPOLLIN)

    def remove(self, file: int) -> None:
        """Stop reading a source; called by the thread that is reading it, before its file is closed."""
        with self._lock:
            place = self._places.pop(file, None)
            if place is None:
                return
            assert self._epoll is not None
            if not place.is_waited_for:
                self._epoll.unregister(file)
            if not self._places and _LEADS.reactor is not self:
                os.eventfd_write(self._wake, 1)

    def hand_over(self) -> None:
        """Let another thread lead; called by the leader."""
        with self._lock:
            if not self._waiting:
                try:
                    self._start()
                except RuntimeError:  # no more threads for now: the other sources have to wait too
                    return
            place = self._at
            if place is not None and self._places.get(place.file) is place:
                assert self._epoll is not None
                self._epoll.unregister(place.file)
                place.is_waited_for = True
        _LEADS.reactor = None
        self._leading.release()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="dflow read", daemon=True)
        thread.start()
        self._threads += 1
        self._waiting += 1

    def _run(self) -> None:
        become_reader()
        before_waiting(give_way)
        while True:
            self._leading.acquire()
            with self._lock:
                self._waiting -= 1
            _LEADS.reactor = self
            self._lead()
            with self._lock:
                if self._ends():
                    return
                self._waiting += 1

    def _ends(self) -> bool:
        """Return whether a thread that has handed over the lead should end; the last thread closes the epoll."""
        if self._places and not self._waiting:
            return False
        self._threads -= 1
        if not self._threads and self._epoll is not None:
            self._epoll.close()
            os.close(self._wake)
            self._epoll = None
        return True

    def _lead(self) -> None:
        """Poll and read the sources, until another thread leads or no source is left."""
        epoll = self._epoll
        while self._places and epoll is not None:
            for file, _ in epoll.poll(self._patience_s(), _EVENTS_AT_A_TIME):
                place = self._places.get(file)
                if place is not None:
                    self._read(place)
                elif file == self._wake:
                    os.eventfd_read(file)
                if _LEADS.reactor is not self:
                    return
            if self._stalls_at:
                self._end_stalled()
        _LEADS.reactor = None
        self._leading.release()

    def _read(self, place: _Place) -> None:
        self._at = place
        if self._stalls_at:
            self._stalls_at.pop(place, None)
        try:
            is_in_frame = place.source.read()
        except Exception:
            LOGGER.exception("a connection is read no longer, since reading it failed")
            self.remove(place.file)
            return
        if is_in_frame:
            self._stalls_at[place] = time.monotonic() + self._stall_timeout_s
        if place.is_waited_for:
            self._take_back(place)

    def _take_back(self, place: _Place) -> None:
        """Return a source to the leader, and wake the leader if the source may stall."""
        with self._lock:
            if self._places.get(place.file) is place:
                assert self._epoll is not None
                place.is_waited_for = False
                self._epoll.register(place.file, select.EPOLLIN)
                if place in self._stalls_at:
                    os.eventfd_write(self._wake, 1)

    def _patience_s(self) -> float | None:
        if not self._stalls_at:
            return None
        return max(min(self._stalls_at.values()) - time.monotonic(), 0)

    def _end_stalled(self) -> None:
        """Call `stalled` on each source whose time is over, and drop the deadlines of removed sources."""
        now = time.monotonic()
        for place, ends in list(self._stalls_at.items()):
            if ends <= now:
                del self._stalls_at[place]
                if self._places.get(place.file) is place:
                    self._at = place
                    place.source.stalled()
