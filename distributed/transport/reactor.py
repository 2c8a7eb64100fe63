"""Who reads the connections of a process: one thread for all of them, and another for one that has to be waited for.

Why: threads that each read a connection take turns at the interpreter's lock, and with a few busy connections spend as
much time on that as on the messages. So one thread at a time *leads*: it asks the system which connections have
something, and takes it. When it has to wait in the middle of that (for the rest of a large payload, for a value that is
still being computed) it gives way: it leads no longer, another thread does, and the connection it is at belongs to it
alone until it is done.

Invariants:

- One thread at a time is at a source: either the one that leads, or the one that gave way there.
- A source is asked to read as long as it is here; it leaves by `remove`, before its file is closed.
- There are threads while there are sources: one that leads, at most one that waits to, and those that gave way.
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from dflow.distributed.transport.exchange import LOGGER, become_reader
from dflow.distributed.transport.outlet import flush
from dflow.lowering.computed import before_waiting

_EVENTS_AT_A_TIME = 64


class Source(Protocol):
    """Something that is read."""

    def read(self) -> bool:
        """Take what is there, without waiting unless it gave way before; whether that ends in the middle of a frame.

        What it raises is logged, and it is read no longer.
        """
        ...

    def stalled(self) -> None:
        """Nothing more of a frame came for as long as was allowed."""
        ...


@dataclass(eq=False)
class _Place:
    """Where a source is read; `is_waited_for` while a thread that gave way is at it."""

    file: int
    source: Source
    is_waited_for: bool = False


class _Leads(threading.local):
    reactor: Reactor | None = None


_LEADS = _Leads()


def give_way() -> None:
    """To be called before waiting: what this thread has gathered is sent; if it leads, another does from now on."""
    flush()
    if _LEADS.reactor is not None:
        _LEADS.reactor.hand_over()


class Reactor:
    """Reads sources; `stall_timeout_s` is how long one may be in the middle of a frame without a byte."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._leading = threading.Lock()
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._threads = 0
        self._waiting = 0
        #: Where the thread is that leads.
        self._at: _Place | None = None
        #: When a source that is in the middle of a frame counts as stalled.
        self._stalls_at: dict[_Place, float] = {}

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return self._threads

    def add(self, file: int, source: Source) -> None:
        """Read `source` whenever its file has something, until `remove`; raises RuntimeError if no thread can start."""
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
        """Read a source no longer; called by whoever is at it, before its file is closed."""
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
        """Let another thread lead; called by the one that does."""
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
        """Whether a thread that leads no longer is one too many; the last one leaves nothing open."""
        if self._places and not self._waiting:
            return False
        self._threads -= 1
        if not self._threads and self._epoll is not None:
            self._epoll.close()
            os.close(self._wake)
            self._epoll = None
        return True

    def _lead(self) -> None:
        """Read what there is, until another thread leads or there is nothing to read any more."""
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
        """Have a source read again by whoever leads, who may have to look at the clock for it."""
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
        """Give up the frames whose time is over; those of sources that have gone are forgotten then."""
        now = time.monotonic()
        for place, ends in list(self._stalls_at.items()):
            if ends <= now:
                del self._stalls_at[place]
                if self._places.get(place.file) is place:
                    self._at = place
                    place.source.stalled()
