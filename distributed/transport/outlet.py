"""Sending frames over a stream, whole and in order, without ever making a reader thread wait.

Why: if the reader threads of two tasks both waited for room to send to each other, neither would read again. So a
thread that reads sends only what the stream takes at once; the rest is sent by a thread started for it.

Invariants: frames are never interleaved (`_sending` is held from the first byte of a frame to its last, and may be
passed to the finishing thread). Frames sent by reader threads leave in the order they were sent: while any is
queued, later ones queue behind it. The queue is bounded by `Limits.max_unsent`, and in time by `stall_timeout_s`.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from dflow.distributed.transport.base import Limits
from dflow.distributed.transport.exchange import Frame, on_reader_thread
from dflow.distributed.transport.framing import pack_header
from dflow.distributed.transport.stream import Parts, Stream, without
from dflow.tracing.errors import TransportClosed


class Outlet:
    """The sending half of a connection; `on_failure` is told why when a queued frame could not be sent."""

    def __init__(self, stream: Stream, limits: Limits, on_failure: Callable[[str], None]) -> None:
        self._stream = stream
        self._limits = limits
        self._on_failure = on_failure
        self._sending = threading.Lock()
        self._queue_lock = threading.Lock()
        self._queue: collections.deque[Parts] = collections.deque()
        self._is_draining = False

    def send(self, frame: Frame) -> None:
        """Send `frame`; from a reader thread, queue what cannot be sent at once.

        raises  TransportClosed with the reason as its text, after which the connection is of no use
        """
        parts = [memoryview(part) for part in (pack_header(frame), frame.meta, frame.payload)]
        if on_reader_thread():
            self._send_or_queue(parts)
            return
        with self._sending:
            try:
                self._send_all(parts)
            except TransportClosed:
                raise
            except BaseException:
                self._on_failure("a send was interrupted in the middle of a frame")
                raise

    def _send_or_queue(self, parts: Parts) -> None:
        with self._queue_lock:
            if self._is_draining or not self._sending.acquire(blocking=False):
                self._enqueue(parts)
                return
        try:
            rest = without(parts, _sent(self._stream.send_now, parts))
        except BaseException:
            self._sending.release()
            raise
        if not rest:
            self._sending.release()
            return
        with self._queue_lock:
            drains_queue = not self._is_draining
            self._is_draining = True
        self._start_drain(rest, drains_queue)

    def _enqueue(self, parts: Parts) -> None:
        if len(self._queue) >= self._limits.max_unsent:
            raise TransportClosed(f"the other side leaves {len(self._queue)} frames unread")
        self._queue.append(parts)
        if not self._is_draining:
            self._is_draining = True
            self._start_drain([], drains_queue=True)

    def _start_drain(self, begun: Parts, drains_queue: bool) -> None:
        """Send `begun` (with `_sending` held already, unless empty), then the queue, on a thread of its own."""
        threading.Thread(target=self._drain, args=(begun, drains_queue), name="dflow drain", daemon=True).start()

    def _drain(self, begun: Parts, drains_queue: bool) -> None:
        try:
            if begun:
                try:
                    self._send_all(begun)
                finally:
                    self._sending.release()
            while drains_queue and (parts := self._next_queued()) is not None:
                with self._sending:
                    self._send_all(parts)
        except TransportClosed as error:
            self._on_failure(str(error))

    def _next_queued(self) -> Parts | None:
        with self._queue_lock:
            if not self._queue:
                self._is_draining = False
                return None
            return self._queue.popleft()

    def _send_all(self, parts: Parts) -> None:
        while parts:
            sent = _sent(self._stream.send, parts)
            if sent == 0:
                raise TransportClosed(f"the other side took no byte for {self._limits.stall_timeout_s:g} s")
            parts = without(parts, sent)


def _sent(send: Callable[[Parts], int], parts: Parts) -> int:
    try:
        return send(parts)
    except OSError as error:
        raise TransportClosed(error.strerror or str(error)) from error
