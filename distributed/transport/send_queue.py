"""The send queue of a connection: frames go out whole and in order, and a reader thread never waits for room to send.

Why: if the reader threads of two tasks both waited for room to send to each other, neither would read again. So a
reader thread sends only the bytes that the stream accepts without blocking; a drain thread sends the rest.

Invariants:

- Frames are never interleaved: the lock `_sending` is held from the first byte of a frame to its last, and may be
  passed to the drain thread.
- The thread that holds `_sending` packs a frame right before sending it. Packing numbers it, so numbers are in order.
- Frames of reader threads leave in the order they were sent: while one is queued, later ones queue behind it. The queue
  holds at most `Limits.max_unsent` frames, and a stream that accepts no byte for `stall_timeout_s` breaks.
- Frames gathered by a thread of a reactor wait in the queue too. They leave before the next frame that is sent, at the
  latest when that thread flushes. So do the frames of `send_with_next`, until its caller flushes.
- Without a stream, frames are packed (which retains them) and not sent.
- A stream is closed under `_sending`: no thread can then send on a file descriptor that the system has reused.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

from dflow.distributed.transport.link import Frame, Limits, on_reader_thread
from dflow.distributed.transport.stream import Parts, Stream, without
from dflow.tracing.errors import TransportClosed

#: Frames with larger payloads are not gathered.
GATHERED_BYTES = 32 << 10
_MOST_GATHERED = 64


class _Gathering(threading.local):
    queues: set[SendQueue] | None = None


_GATHERING = _Gathering()


def gather() -> None:
    """From now on gather the frames that this thread sends, until it flushes, to send them together by connection."""
    _GATHERING.queues = set()


def flush() -> None:
    """Send the frames that this thread has gathered."""
    queues = _GATHERING.queues
    while queues:
        queues.pop().flush()


class SendQueue:
    """The sending half of a connection; `pack` returns the bytes of frames that are about to be sent."""

    def __init__(self, stream: Stream, limits: Limits, pack: Callable[[Sequence[Frame]], Parts]) -> None:
        self._stream: Stream | None = stream
        self._limits = limits
        self._pack = pack
        self._sending = threading.Lock()
        self._queue_lock = threading.Lock()
        self._queue: collections.deque[Frame] = collections.deque()
        self._is_draining = False

    def send(self, frame: Frame) -> None:
        """Send `frame`; on a reader thread, queue what cannot be sent without blocking.

        raises  TransportClosed, with the reason as its text, if the queue is full
        """
        queues = _GATHERING.queues
        if queues is None and not on_reader_thread():
            with self._sending:
                self._send_all(self._pack(self._with_gathered(frame) if self._queue else (frame,)))
            return
        is_full = self._append(frame) > _MOST_GATHERED
        if queues is None or is_full or len(frame.payload) > GATHERED_BYTES:
            self.flush()
        else:
            queues.add(self)

    def send_with_next(self, frame: Frame) -> None:
        """Queue `frame`, to be sent with the next frame or by `flush`; raises TransportClosed if the queue is full."""
        if self._append(frame) > _MOST_GATHERED:
            self.flush()

    def _append(self, frame: Frame) -> int:
        """Queue a frame; return the length of the queue."""
        with self._queue_lock:
            if self._is_draining and len(self._queue) >= self._limits.max_unsent:
                raise TransportClosed(f"the other side leaves {len(self._queue)} frames unread")
            self._queue.append(frame)
            return len(self._queue)

    def flush(self) -> None:
        """Send the queued frames; leave to a drain thread what would block."""
        with self._queue_lock:
            if self._is_draining or not self._queue:
                return  # another thread has sent them, or will
            if not self._sending.acquire(blocking=False):
                self._is_draining = True
                self._start_drain([])
                return
            frames, self._queue = self._queue, collections.deque()
        try:
            rest = self._send_now(self._pack(frames))
        except BaseException:
            self._sending.release()
            raise
        if not rest:
            self._sending.release()
            return
        with self._queue_lock:
            self._is_draining = True
        self._start_drain(rest)

    def say_last(self, frame: Frame) -> None:
        """Send `frame` if that needs no waiting; nothing is sent after this call."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.send(self._pack(self._with_gathered(frame)), waits=False)
        except OSError:
            pass
        finally:
            self._sending.release()

    def close_stream(self, stream: Stream) -> None:
        """Close a stream that was shut down, and send nothing more on it."""
        with self._sending:
            if self._stream is stream:
                self._stream = None
            stream.close()

    def resume(self, stream: Stream, again: Callable[[], Sequence[Parts]]) -> None:
        """Send over `stream` from now on: first the frames that `again` returns, on a new thread, then all others."""
        self._sending.acquire()
        self._stream = stream
        rest = [part for parts in again() for part in parts]
        if rest:
            self._start_drain(rest)
        else:
            self._sending.release()

    def _with_gathered(self, frame: Frame) -> Sequence[Frame]:
        """Take the frames from the queue, which go before `frame`; called with `_sending` held."""
        with self._queue_lock:
            frames, self._queue = self._queue, collections.deque()
        frames.append(frame)
        return frames

    def _start_drain(self, begun: Parts) -> None:
        """Start a drain thread for `begun`, then the queue; it takes over `_sending` unless `begun` is empty."""
        threading.Thread(target=self._drain, args=(begun,), name="dflow drain", daemon=True).start()

    def _drain(self, begun: Parts) -> None:
        if begun:
            try:
                self._send_all(begun)
            finally:
                self._sending.release()
        while True:
            with self._sending:  # also while taking the frame: several drain threads keep the order
                frame = self._next_queued()
                if frame is None:
                    return
                self._send_all(self._pack([frame]))

    def _next_queued(self) -> Frame | None:
        with self._queue_lock:
            if not self._queue:
                self._is_draining = False
                return None
            return self._queue.popleft()

    def _send_all(self, parts: Parts) -> None:
        """Send `parts` to the last byte, or until the stream breaks."""
        stream = self._stream
        if stream is None:
            return
        left = sum(map(len, parts))
        try:
            while left and (sent := stream.send(parts)):
                left -= sent
                if left:
                    parts = without(parts, sent)
        except OSError:
            pass
        finally:
            if left:  # it broke, took no byte for `stall_timeout_s`, or the thread was interrupted within a frame
                self._abandon(stream)

    def _send_now(self, parts: Parts) -> Parts:
        """Send what the stream accepts without blocking; return the rest, which is empty if the stream broke."""
        stream = self._stream
        if stream is None:
            return []
        try:
            sent = stream.send(parts, waits=False)
        except OSError:
            self._abandon(stream)
            return []
        return [] if sent == sum(map(len, parts)) else without(parts, sent)

    def _abandon(self, stream: Stream) -> None:
        """Send nothing more over a stream that broke, and wake the thread that reads it."""
        self._stream = None
        stream.shut_down()
