"""Getting a new stream for a session whose stream broke: one side dials again, the other waits to be dialled.

Invariants: both abandon the session after `Limits.resume_s`, or as soon as they know that the other process is gone:
nothing listens at its address, it does not know the session, or (on one machine) it has ended. A session whose streams
break `_MOST_IN_A_ROW` times without a frame received in between is abandoned too, once that has gone on for
`Limits.resume_s`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import msgspec

from dflow.distributed.transport.base import Limits
from dflow.distributed.transport.connection import Renewed
from dflow.distributed.transport.deadline import Deadline
from dflow.distributed.transport.handshake import say_hello
from dflow.distributed.transport.process_identity import open_process
from dflow.distributed.transport.stream import Stream
from dflow.distributed.wire.messages import Hello
from dflow.tracing.errors import DeadlineExceeded, DflowError, SecurityError, TransportClosed, WireError

_FIRST_RETRY_S = 0.02
_LONGEST_RETRY_S = 0.5
_MOST_IN_A_ROW = 20

#: Dials once; takes the number of frames received here, and the time-out in seconds. See `Redial`.
Dial = Callable[[int, float], Renewed]


class SessionUnknown(TransportClosed):
    """The other side does not know the session to resume."""


class Redial:
    """The renewal of the side that dialled. `dial` raises SessionUnknown, OSError or a DflowError."""

    def __init__(self, dial: Dial, resume_s: float) -> None:
        self._dial = dial
        self._resume_s = resume_s
        self._cancelled = threading.Event()
        self._passed = (0, 0)
        self._in_a_row = 0
        self._stuck_at = 0.0

    def renew(self, received: int, reason: str) -> Renewed | str:
        """Dial until it succeeds; see `connection.Renewal`."""
        now = time.monotonic()
        if self._in_a_row == 0:
            self._stuck_at = now
        if self._in_a_row >= _MOST_IN_A_ROW and now - self._stuck_at > self._resume_s:
            return f"{reason}; the connection broke {self._in_a_row} times in a row"
        deadline = now + self._resume_s
        retry_s = _FIRST_RETRY_S
        while not self._cancelled.is_set():
            try:
                renewed = self._dial(received, max(deadline - time.monotonic(), 0.001))
            except (ConnectionRefusedError, FileNotFoundError):
                return f"{reason}, and nothing listens there any more"
            except (SessionUnknown, SecurityError, WireError) as error:
                return f"{reason}, and {error}"
            except (OSError, DflowError) as error:
                if time.monotonic() + retry_s >= deadline:
                    return f"{reason}, and it could not be reached again within {self._resume_s:g} s: {error}"
            else:
                passed = (received, renewed.peer_received)
                self._in_a_row = self._in_a_row + 1 if passed == self._passed else 0
                self._passed = passed
                return renewed
            self._cancelled.wait(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
        return "closed by this side"

    def cancel(self) -> None:
        """Stop dialling, now and later."""
        self._cancelled.set()


class AwaitRedial:
    """The renewal of the side that listens; `answer` is its `Hello` to the process that reconnects."""

    def __init__(self, process: str, answer: Hello, limits: Limits) -> None:
        self._process = process
        self._answer = answer
        self._limits = limits
        self._lock = threading.Lock()
        self._wake: int | None = None
        self._offer: tuple[Stream, int] | None = None
        self._is_over = False

    def offer(self, stream: Stream, peer_received: int) -> bool:
        """Take over a stream on which the process has reconnected; False if the session is over."""
        with self._lock:
            if self._is_over:
                return False
            before, self._offer = self._offer, (stream, peer_received)
            self._wake_up()
        if before is not None:
            before[0].close()
        return True

    def renew(self, received: int, reason: str) -> Renewed | str:
        """Wait for the process to reconnect; see `connection.Renewal`."""
        deadline = Deadline.after(self._limits.resume_s)
        while True:
            lost = self._wait(deadline)
            with self._lock:
                offered, self._offer = self._offer, None
                if self._is_over or offered is None:
                    break
            stream, peer_received = offered
            try:
                say_hello(stream, _with_received(self._answer, received), Deadline.after(self._limits.hello_timeout_s))
                stream.set_timeout(self._limits.stall_timeout_s)
            except (OSError, DeadlineExceeded):
                stream.close()
                continue
            return Renewed(stream, peer_received)
        self.cancel()
        if offered is not None:
            offered[0].close()
        return f"{reason}{lost}"

    def cancel(self) -> None:
        """Accept no more streams, and wake `renew`."""
        with self._lock:
            self._is_over = True
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def _wait(self, deadline: Deadline) -> str:
        """Wait for an offer or `cancel`, and return ""; or describe the end of the process, or the missed deadline."""
        with self._lock:
            if self._is_over or self._offer is not None:
                return ""
            wake = self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            return self._poll(wake, deadline)
        finally:
            with self._lock:
                self._wake = None
                os.close(wake)

    def _poll(self, wake: int, deadline: Deadline) -> str:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        try:
            process = open_process(self._process)
        except ProcessLookupError as error:
            return f": {error}"
        try:
            if process is not None:
                poll.register(process, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(deadline.left_s * 1000)}
        finally:
            if process is not None:
                os.close(process)
        if wake in ready:
            return ""
        return ": its process has ended" if ready else f", and did not come back within {deadline.timeout_s:g} s"


def _with_received(hello: Hello, received: int) -> Hello:
    return msgspec.structs.replace(hello, received=received)
