"""The coordinator as a process: messages become events, commands become messages, and the clock ticks.

Nothing is decided here; see `coordinator_state`.

Invariants:
- events are handled one at a time, and the commands of one are carried out before the next is handled, so
  that every task sees rosters in the order in which they were made;
- carrying out a command never waits for a peer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from dflow.distributed.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Disconnect,
    Event,
    PeerClosed,
    Reply,
    Ticked,
    Told,
)
from dflow.distributed.coordinator_state import CoordinatorState
from dflow.distributed.messages import AnyMessage, Status
from dflow.distributed.stop_signal import StopSignal
from dflow.distributed.transport.base import Peer, Responder, Transport
from dflow.distributed.transport.exchange import become_reader
from dflow.tracing.errors import TransportClosed

NAME = "coordinator"
#: The first line the process prints, up to the address.
LISTENING = "dflow coordinator listening on "


class Coordinator:
    """A coordinator that listens until it is closed.

    `jobs`                 the tasks that are expected, as job -> how many
    `heartbeat_timeout_s`  a task not heard of for so long has left
    `tick_s`               how often silence is looked for; None leaves that to calls of `tick`
    `clock`                seconds since any moment
    raises                 what `transport.listen` raises
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        jobs: Mapping[str, int],
        *,
        heartbeat_timeout_s: float = 10.0,
        tick_s: float | None = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = CoordinatorState(jobs, heartbeat_timeout_s)
        self._clock = clock
        self._started_s = clock()
        self._lock = threading.RLock()
        self._is_handling = False
        self._arrived: deque[Callable[[float], Event]] = deque()
        self._peers: dict[int, Peer] = {}
        self._numbers: dict[Peer, int] = {}
        self._asks: dict[int, Responder] = {}
        self._last_number = 0
        self._closed = threading.Event()
        self._listener = transport.listen(address, name=NAME, handler=self)
        if tick_s is not None:
            threading.Thread(target=self._tick_every, args=(tick_s,), name="dflow tick", daemon=True).start()

    @property
    def address(self) -> str:
        """Where tasks connect to."""
        return self._listener.address

    def status(self) -> Status:
        """Everything a person would ask."""
        with self._lock:
            return self._state.status(self._clock() - self._started_s)

    def log(self) -> tuple[Event, ...]:
        """The newest events, oldest first."""
        with self._lock:
            return tuple(self._state.log)

    def tick(self) -> None:
        """Let the state see what time it is."""
        self._submit(Ticked)

    def close(self) -> None:
        """Stop listening and end every connection; a second call does nothing."""
        self._closed.set()
        self._listener.close()

    def on_call(self, peer: Peer, message: AnyMessage, payload: memoryview, responder: Responder) -> None:
        """Take a request; see `transport.base.Handler`."""
        with self._lock:
            number, ask = self._number(peer), self._new_number()
            self._asks[ask] = responder
            self._submit(lambda at_s: Asked(at_s, number, ask, message))

    def on_notify(self, peer: Peer, message: AnyMessage, payload: memoryview) -> None:
        """Take a message that wants no answer."""
        with self._lock:
            number = self._number(peer)
            self._submit(lambda at_s: Told(at_s, number, message))

    def on_close(self, peer: Peer, reason: str) -> None:
        """Note that a connection has ended."""
        with self._lock:
            number = self._number(peer)
            self._peers.pop(self._numbers.pop(peer))
            self._submit(lambda at_s: PeerClosed(at_s, number, reason))

    def _number(self, peer: Peer) -> int:
        if peer not in self._numbers:
            number = self._new_number()
            self._numbers[peer], self._peers[number] = number, peer
        return self._numbers[peer]

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _submit(self, event: Callable[[float], Event]) -> None:
        """Handle the event now, or after the one being handled when a command of that one caused it."""
        with self._lock:
            self._arrived.append(event)
            if self._is_handling:
                return
            self._is_handling = True
            try:
                while self._arrived:
                    for command in self._state.handle(self._arrived.popleft()(self._clock() - self._started_s)):
                        self._carry_out(command)
            finally:
                self._is_handling = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case Reply(ask, message):
                self._asks.pop(ask).reply(message)
            case Broadcast(peers, message):
                for peer in [self._peers[number] for number in peers if number in self._peers]:
                    with contextlib.suppress(TransportClosed):  # its end is an event of its own
                        peer.notify(message)
            case Disconnect(number, reason):
                if number in self._peers:
                    self._peers[number].close(reason)

    def _tick_every(self, tick_s: float) -> None:
        become_reader()
        while not self._closed.wait(tick_s):
            self.tick()


def serve_coordinator(
    stop: StopSignal, transport: Transport, address: str, jobs: Mapping[str, int], *, heartbeat_timeout_s: float = 10.0
) -> int:
    """Be a coordinator until `stop`; prints its address as the first line; returns the exit status."""
    coordinator = Coordinator(transport, address, jobs, heartbeat_timeout_s=heartbeat_timeout_s)
    print(f"{LISTENING}{coordinator.address}", flush=True)
    status, _ = stop.wait_for_exit_status()
    coordinator.close()
    return status
