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
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from dflow.distributed.transport.link import LOGGER, become_reader
from dflow.distributed.transport.send_queue import flush, gather
from dflow.lowering.values.computed import before_waiting

_EVENTS_AT_A_TIME = 64


@dataclass(eq=False)
class _Source:
    """A connection to read; `is_waited_for` while a thread that handed over the lead is reading it."""

    file: int
    read: Callable[[], bool]
    stalled: Callable[[], None]
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
        self._sources: dict[int, _Source] = {}
        self._epoll = select.epoll()
        #: Readable when the leader should look again at the sources and their deadlines.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._epoll.register(self._wake, select.EPOLLIN)
        #: Number of reader threads.
        self.threads = 0
        self._waiting = 0
        #: The source that the leader is reading.
        self._at: _Source | None = None
        #: For each source in the middle of a frame, the monotonic time at which it counts as stalled.
        self._stalls_at: dict[_Source, float] = {}

    def add(self, file: int, read: Callable[[], bool], stalled: Callable[[], None]) -> None:
        """Read a source until `remove`; raises RuntimeError if no thread can be started.

        read     called when `file` has data, to read all of it; returns whether that ends in the middle of a frame. It
                 may wait only after a call of `give_way`. An exception is logged, and ends the reading of this source
        stalled  called when no byte of a begun frame has arrived for `stall_timeout_s`

        Both flush the frames that they send: the thread gathers them.
        """
        with self._lock:
            if not self.threads:
                self._start()
            self._sources[file] = _Source(file, read, stalled)
            self._epoll.register(file, select.EPOLLIN)

    def remove(self, file: int) -> None:
        """Stop reading a source; called by the thread that is reading it, before its file is closed."""
        with self._lock:
            source = self._sources.pop(file, None)
            if source is None:
                return
            if not source.is_waited_for:
                self._epoll.unregister(file)
            if not self._sources and _LEADS.reactor is not self:
                os.eventfd_write(self._wake, 1)

    def hand_over(self) -> None:
        """Let another thread lead; called by the leader."""
        with self._lock:
            if not self._waiting:
                try:
                    self._start()
                except RuntimeError:  # no more threads for now: the other sources have to wait too
                    return
            source = self._at
            if source is not None and self._sources.get(source.file) is source:
                self._epoll.unregister(source.file)
                source.is_waited_for = True
        _LEADS.reactor = None
        self._leading.release()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="dflow read", daemon=True)
        thread.start()
        self.threads += 1
        self._waiting += 1

    def _run(self) -> None:
        become_reader()
        gather()
        before_waiting(give_way)
        while True:
            self._leading.acquire()
            with self._lock:
                self._waiting -= 1
            _LEADS.reactor = self
            self._lead()
            with self._lock:
                if self._waiting or not self._sources:
                    self.threads -= 1
                    return
                self._waiting += 1

    def _lead(self) -> None:
        """Poll and read the sources, until another thread leads or no source is left."""
        while self._sources:
            ends = min(self._stalls_at.values(), default=None)
            patience_s = None if ends is None else max(ends - time.monotonic(), 0)
            for file, _ in self._epoll.poll(patience_s, _EVENTS_AT_A_TIME):
                source = self._sources.get(file)
                if source is not None:
                    self._read(source)
                elif file == self._wake:
                    os.eventfd_read(file)
                if _LEADS.reactor is not self:
                    # It handed over the lead while it read. The new leader's poll has the rest of these events again.
                    return
            if self._stalls_at:
                self._end_stalled()
        _LEADS.reactor = None
        self._leading.release()

    def _read(self, source: _Source) -> None:
        self._at = source
        if self._stalls_at:
            self._stalls_at.pop(source, None)
        try:
            is_in_frame = source.read()
        except Exception:
            LOGGER.exception("a connection is read no longer, since reading it failed")
            self.remove(source.file)
            return
        if is_in_frame:
            self._stalls_at[source] = time.monotonic() + self._stall_timeout_s
        if not source.is_waited_for:
            return
        with self._lock:  # another thread leads: return the source to it, and wake it if the source may stall
            if self._sources.get(source.file) is source:
                source.is_waited_for = False
                self._epoll.register(source.file, select.EPOLLIN)
                if source in self._stalls_at:
                    os.eventfd_write(self._wake, 1)

    def _end_stalled(self) -> None:
        """Call `stalled` on each source whose time is over, and drop the deadlines of removed sources."""
        now = time.monotonic()
        for source, ends in list(self._stalls_at.items()):
            if ends <= now:
                del self._stalls_at[source]
                if self._sources.get(source.file) is source:
                    self._at = source
                    source.stalled()
