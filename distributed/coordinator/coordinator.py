"""The coordinator's shell: it makes events of messages, carries out commands, and ticks.

It decides nothing; see `coordinator_state`.

Invariants:
- events are handled one at a time, and their commands are carried out in order, so that every task sees rosters
  in the order of their versions;
- the changes of an event are written to the store before its commands are carried out; events that arrive during a
  write are written together;
- when a write fails, the changes are written later (`surviving_store`), and commands that depend on changes that may
  not be lost wait until then (`CoordinatorState.waits`);
- when an event or command raises an unexpected error, the coordinator answers nothing more and ends, so that the next
  one resumes from the last write;
- carrying out a command never waits for a peer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Disconnect,
    Event,
    Log,
    PeerClosed,
    Persist,
    SendReply,
    Started,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.coordinator_part import CoordinatorPart, CoordinatorSettings
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator.coordinator_store import CoordinatorStore, MemoryStore
from dflow.distributed.coordinator.durable_records import SHELL, Change
from dflow.distributed.coordinator.surviving_store import SurvivingStore
from dflow.distributed.observe.metrics import MetricsEndpoint, coordinator_metrics
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.base import Handler, Peer, Responder, Transport
from dflow.distributed.transport.link import become_reader
from dflow.distributed.wire.large_message import RosterPacker, pack
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Join, Roster
from dflow.distributed.wire.messages.status import Status
from dflow.lowering.queues.mailbox import Mailbox
from dflow.tracing.errors import InternalError, SecurityError, TransportClosed
from dflow.tracing.moments import reach

NAME = "coordinator"
#: Prefix of the first line that the process prints; the address follows.
LISTENING = "dflow coordinator listening on "
LOGGER = logging.getLogger("dflow")
#: A message to more tasks than these is encoded once for all.
FEW = 8
#: Key of the time of the last write.
_TIME = f"{SHELL}time"


class Coordinator(Handler):
    """A coordinator that listens until it is closed.

    `jobs`         number of expected tasks by job
    `parts`        the classes of its parts, such as `coordinator_role.COORDINATOR_PARTS`
    `store`        holds its state across restarts; closed with the coordinator, or when this raises
    `settings`     its timeouts
    `tick_s`       interval between ticks, which detect silent tasks; None leaves them to calls of `tick`
    `clock`        seconds since an arbitrary moment; after a restart its time goes on from the last write
    `on_fault`     called once with the reason when a fault ends the coordinator
    raises         what `transport.listen` raises
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        jobs: Mapping[str, int],
        *,
        parts: Sequence[type[CoordinatorPart]],
        store: CoordinatorStore | None = None,
        settings: CoordinatorSettings | None = None,
        tick_s: float | None = 0.5,
        clock: Callable[[], float] = time.monotonic,
        on_fault: Callable[[str], None] = lambda fault: None,
    ) -> None:
        self._store = SurvivingStore(store or MemoryStore())
        #: Commands that wait until the store has the changes that they depend on.
        self._held: list[Command] = []
        rows = self._store.load()
        self._state = CoordinatorState(jobs, settings or CoordinatorSettings(), rows, parts=parts)
        #: By class of a message, or key of a record; see `CoordinatorPart`.
        self._moments = {key: moment for part in parts for key, moment in part.moments.items()}
        self._clock = clock
        # The records have times. A wall clock would not do: it may have been set by days in between.
        self._started_s = clock() - (msgspec.msgpack.decode(rows[_TIME], type=float) if _TIME in rows else 0.0)
        self._on_fault = on_fault
        self._mailbox: Mailbox[Callable[[float], Event]] = Mailbox(self._handle_arrived)
        self._numbering = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._numbers: dict[Peer, int] = {}
        self._asks: dict[int, Responder] = {}
        self._new_numbers = itertools.count(1)
        self._rosters = RosterPacker()
        self._closed = threading.Event()
        try:
            with self._mailbox.lock:
                # Not posted: a fault before this coordinator listens is raised here, `on_fault` gets the later ones.
                self._handle_all(deque([lambda at_s: Started(at_s, secrets.token_hex(8))]))
                self._listener = transport.listen(address, name=NAME, handler=self)
        except BaseException:
            self._store.close()
            raise
        #: Address that tasks connect to.
        self.address = self._listener.address
        if tick_s is not None:
            threading.Thread(target=self._tick_every, args=(tick_s,), name="dflow tick", daemon=True).start()

    def status(self) -> Status:
        """Return the status for people and tools."""
        with self._mailbox.lock:
            return self._state.status(self._clock() - self._started_s)

    def tick(self) -> None:
        """Have the state handle a tick, so that deadlines take effect."""
        self._mailbox.post(Ticked)

    def close(self) -> None:
        """Stop listening, close every connection and the store; a second call does nothing."""
        self._closed.set()
        self._listener.close()
        with self._mailbox.lock:
            self._store.close()

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Have the state handle a request; raises SecurityError for a Join under another name than the connection's."""
        if isinstance(message, Join) and message.task != peer.name:
            raise SecurityError(f"{peer.name} asks to join as {message.task}; a task joins by its own name")
        with self._numbering:
            number, ask = self._number(peer), next(self._new_numbers)
            self._asks[ask] = responder
        self._mailbox.post(lambda at_s: Asked(at_s, number, ask, message))

    def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
        """Have the state handle a notification."""
        with self._numbering:
            number = self._number(peer)
        self._mailbox.post(lambda at_s: Told(at_s, number, message))

    def on_close(self, peer: Peer, reason: str) -> None:
        """Forget a connection that has ended, and have the state handle its end."""
        with self._numbering:
            number = self._number(peer)
            self._peers.pop(self._numbers.pop(peer))
        self._mailbox.post(lambda at_s: PeerClosed(at_s, number, reason))

    def _number(self, peer: Peer) -> int:
        if peer not in self._numbers:
            number = next(self._new_numbers)
            self._numbers[peer], self._peers[number] = number, peer
        return self._numbers[peer]

    def _handle_arrived(self, arrived: deque[Callable[[float], Event]]) -> None:
        """Handle all queued events; an error ends the coordinator. Drops the events if it has ended."""
        if self._closed.is_set():
            arrived.clear()
            return
        try:
            self._handle_all(arrived)
        except OSError as error:
            self._end_by_fault(str(error))
        except Exception as error:
            LOGGER.exception("the coordinator has failed")
            self._end_by_fault(f"it has failed: {type(error).__name__}: {error}")

    def _handle_all(self, arrived: deque[Callable[[float], Event]]) -> None:
        """Handle the events queued by now: write their changes together, then carry out their commands."""
        changes: list[Change] = []
        commands: list[Command] = []
        # Only the events queued by now: events that keep arriving must not delay the write.
        for _ in range(len(arrived)):
            for command in self._state.handle(arrived.popleft()(self._clock() - self._started_s)):
                if isinstance(command, Persist):
                    changes += command.changes
                else:
                    commands.append(command)
        for moment in {self._moments[change.key] for change in changes if change.key in self._moments}:
            reach(moment, NAME)
        for command in self._written(changes, commands):
            self._carry_out(command)

    def _written(self, changes: list[Change], commands: list[Command]) -> list[Command]:
        """Write the changes; return the commands to carry out now, and keep the commands that must wait in `_held`."""
        now_s = self._clock() - self._started_s
        if changes:
            changes.append(Change(_TIME, msgspec.msgpack.encode(now_s)))
        is_durable = self._store.write(changes, now_s)
        self._state.core.is_durable = is_durable
        if is_durable:
            held, self._held = self._held, []
            return [*held, *commands]
        unwritten = self._store.pending
        self._held += (command for command in commands if self._state.waits(command, unwritten))
        return [command for command in commands if not self._state.waits(command, unwritten)]

    def _end_by_fault(self, fault: str) -> None:
        LOGGER.error("the coordinator ends: %s", fault)
        self._closed.set()
        self._listener.close()
        self._on_fault(fault)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Persist():
                raise InternalError("what has to last is written before all else")
            case Log(text):
                LOGGER.warning("%s", text)
            case SendReply(ask, message):
                with self._numbering:
                    responder = self._asks.pop(ask)
                responder.reply(*(self._rosters.pack(message) if isinstance(message, Roster) else pack(message)))
            case Broadcast(peers, message):
                if (moment := self._moments.get(type(message))) is not None:
                    reach(moment, NAME)
                with self._numbering:
                    there = [self._peers[number] for number in peers if number in self._peers]
                small, payload = pack(message, goes_to_many=len(there) > FEW)
                for peer in there:
                    with contextlib.suppress(TransportClosed):  # its end is another event
                        peer.notify(small, payload)
            case Disconnect(number, reason):
                with self._numbering:
                    gone = self._peers.get(number)
                if gone is not None:
                    gone.close(reason)

    def _tick_every(self, tick_s: float) -> None:
        become_reader()
        while not self._closed.wait(tick_s):
            self.tick()


def serve_coordinator(
    stop: StopSignal,
    transport: Transport,
    address: str,
    jobs: Mapping[str, int],
    *,
    parts: Sequence[type[CoordinatorPart]],
    store: CoordinatorStore,
    settings: CoordinatorSettings,
    metrics: str = "",
) -> int:
    """Run a coordinator until `stop` or a fault, with metrics at `metrics` unless empty; return the exit status.

    The first line that it prints has its address. A fault goes to stderr.
    """
    coordinator = Coordinator(transport, address, jobs, parts=parts, store=store, settings=settings, on_fault=stop.stop)
    print(f"{LISTENING}{coordinator.address}", flush=True)
    endpoint = MetricsEndpoint(lambda: coordinator_metrics(coordinator.status()), metrics) if metrics else None
    if endpoint is not None:
        print(f"dflow coordinator: metrics are served at {endpoint.address}", flush=True)
    status, fault = stop.wait_for_exit_status()
    if fault:
        print(f"dflow coordinator: {fault}", file=sys.stderr)
    if endpoint is not None:
        endpoint.close()
    coordinator.close()
    return status
