"""Send and Recv between tasks: the `Channel` of a task's executor.

Why: the executor knows edges and tasks. This file sends values for another task as one `Values` message to its server,
and receives values on reader threads. Invariants: the rendezvous is used under one lock, and its commands are carried
out after the lock is released, so that a waiter may call back; every wait has a deadline. Values are pushed to a task
until the untaken ones fill a window, and offered beyond; see `flow_control`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from dflow.distributed.steps.deadlines import Deadlines
from dflow.distributed.steps.flow_control import COST_BYTES, Inflow, Offered, Outflow, Reaction
from dflow.distributed.steps.peers import Peers
from dflow.distributed.steps.rendezvous import EndWait, Rendezvous, RendezvousStatistics, describe
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.codec import SentPayload, encode_values
from dflow.distributed.wire.messages.roster import EdgeTraffic, summed_by_edge
from dflow.distributed.wire.messages.transfers import Credit, Offer, Pull, Values
from dflow.lowering.queues.channel import Channel, Deliver, NotConnected, Sent, StepId, edge_alone
from dflow.lowering.queues.timers import Clock, Timers
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.step_events import RECEIVED, SENT, WAIT_EXPIRED
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.outcome import Outcome
from dflow.lowering.values.payload_layout import PayloadLayout
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, TransportClosed, WireError

LOGGER = logging.getLogger("dflow")

#: Limit of the bytes at a task that other tasks pushed and that are not taken.
WINDOW_BYTES = 256 << 20


#: Values sent within this task, or the payload with those of another task.
_Held = Sequence[Sent] | memoryview


class _Receiver(msgspec.Struct, frozen=True, eq=False):
    """A waiter of the rendezvous, with the data for an error about it."""

    step: StepId
    edge: str
    source: str
    layout: PayloadLayout
    deliver: Deliver
    #: When the wait expires, by the clock.
    ends_s: float

    def end(self, outcome: Outcome[_Held]) -> None:
        """Call `deliver` with the outcome. Values from another task are unpacked; malformed ones become WireError."""
        if isinstance(outcome, memoryview):
            try:
                outcome = self.layout.values(outcome)
            except WireError as error:
                outcome = WireError(f"edge {self.edge!r} in {describe(self.step)} is malformed: {error}")
        self.deliver(outcome)


@dataclass(frozen=True)
class _OfferedValues:
    """A number of offered values, ready to be sent; dropped at `ends_s`, by the clock."""

    count: int
    payload: SentPayload
    ends_s: float


class TaskChannel:
    """Sender and receiver of the task `name`; see `lowering.queues.channel.Channel`. Thread-safe."""

    def __init__(
        self,
        name: str,
        peers: Peers,
        *,
        wait_timeout_s: float,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        on_stall: Callable[[str], str] = lambda why: "",
        described: Callable[[str], str] = short_task_name,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._name = name
        self._recorder = recorder or Recorder()
        self._on_stall = on_stall
        self._peers = peers
        self._described = described
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous[_Receiver, _Held] = Rendezvous()
        self._clock = clock or Timers("dflow deadlines")
        #: Stop all deadlines: no wait expires any more.
        self.close = self._clock.close
        self._deadlines = Deadlines(wait_timeout_s, self._waits, self._expire, self._clock, self._lock)
        #: Number of sent messages and their bytes, by edge, destination and number of values in each.
        self._traffic: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._taken_in: Counter[str] = Counter()
        self._outflow: Outflow[_OfferedValues] = Outflow(window_bytes)
        self._inflow = Inflow(window_bytes)
        self._offers = Deadlines(wait_timeout_s, self._kept, self._expire_offer, self._clock, self._lock)
        self.of_parts = Channel(self.send, self.receive)
        #: Of parts begun ahead, whose values may come late: receives wait until the step ends.
        self.of_parts_ahead = Channel(self.send, partial(self.receive, has_deadline=False))

    def send(self, step: StepId, edge: str, destination: str, values: Sequence[Sent]) -> None:
        """Send `values` to `destination`, or offer them if they exceed its window; waits until they are computed.

        Returns when the connection has taken the message. Values for this task itself are delivered here.
        raises  NotConnected if there is no open connection; TaskLost if the destination is not in the cluster; what
                sending raises
        """
        if destination == self._name:
            with self._lock:
                commands = self._rendezvous.put(step, edge, values)
            self._carry_out(commands)
            return
        wait_until_computed(values)
        payload = encode_values(values)
        peer = self._peers.connected(destination)
        if peer is None:
            raise NotConnected(partial(self._peers.when_connected, destination))
        size_bytes = len(payload)
        with self._lock:
            offer = None if self._outflow.pushes(peer, size_bytes) else Offered(peer, step, edge)
            if offer is not None:
                self._outflow.kept[offer] = _OfferedValues(len(values), payload, self._offers.begin())
        began = self._recorder.clock()
        try:
            if offer is not None:
                peer.notify(Offer(step.origin, step.number, edge, size_bytes))
                return
            peer.notify(Values(step.origin, step.number, edge), payload)
        except BaseException:
            # The receiver will neither credit values nor answer an offer that it does not get.
            with self._lock:
                if offer is None:
                    self._outflow.credit(peer, size_bytes + COST_BYTES)
                else:
                    self._outflow.kept.pop(offer, None)
            raise
        self._sent(step, edge, destination, len(values), size_bytes, began)

    def _sent(self, step: StepId, edge: str, destination: str, count: int, size_bytes: int, began: int) -> None:
        self._recorder.append((self._recorder.clock(), SENT, step, edge, destination, size_bytes, began))
        with self._lock:
            key = edge_alone(edge), destination, count
            messages, total_bytes = self._traffic.get(key, (0, 0))
            self._traffic[key] = messages + 1, total_bytes + size_bytes

    def receive(
        self,
        step: StepId,
        edge: str,
        source: str,
        layout: PayloadLayout,
        deliver: Deliver,
        *,
        has_deadline: bool = True,
    ) -> None:
        """Call `deliver` once, now or later on any thread, with the values or with the error that ended the wait.

        has_deadline  whether the wait ends with DeadlineExceeded after `wait_timeout_s`; else only with the step
        """
        with self._lock:
            ends_s = self._deadlines.begin() if has_deadline else math.inf
            commands = self._rendezvous.take(step, edge, source, _Receiver(step, edge, source, layout, deliver, ends_s))
            if commands:
                reactions = self._inflow.taken(step, edge)
            else:
                reactions = self._inflow.awaited(step, edge) if self._inflow.unanswered else []
        if commands or reactions:
            self._carry_out(commands, reactions)

    def arrived(self, message: Values, payload: memoryview, peer: Peer) -> None:
        """Deliver values from another task, or keep them until they are received, and credit the sender."""
        step, edge, source = StepId(message.origin, message.step), message.edge, peer.name
        self._recorder.append((self._recorder.clock(), RECEIVED, step, edge, source, len(payload), 0))
        with self._lock:
            self._taken_in[source] += len(payload)
            commands = self._rendezvous.put(step, edge, payload)
            if message.was_offered:
                reactions = self._inflow.pulled(step, edge)
            elif peer.closed:  # it has been forgotten, or will be
                reactions = []
            elif not commands and self._rendezvous.holds(step, edge):
                reactions = []
                self._inflow.hold(peer, step, edge, len(payload))
            else:
                reactions = self._inflow.used(peer, len(payload))
        self._carry_out(commands, reactions)

    def offered(self, offer: Offer, peer: Peer) -> None:
        """Record an offer: request the value once an op waits for it; decline it if the step has ended."""
        step = StepId(offer.origin, offer.step)
        with self._lock:
            if peer.closed:
                return
            is_awaited, is_open = self._rendezvous.is_awaited(step, offer.edge), self._rendezvous.is_open(step)
            reactions = self._inflow.offer(
                peer, step, offer.edge, offer.size_bytes, is_awaited=is_awaited, is_open=is_open
            )
        self._carry_out((), reactions)

    def pulled(self, pull: Pull, peer: Peer) -> None:
        """Send an offered value that another task requests, or drop it if declined."""
        step = StepId(pull.origin, pull.step)
        offer = Offered(peer, step, pull.edge)
        with self._lock:
            kept = self._outflow.kept.pop(offer, None)
        if kept is not None and pull.wanted:
            began = self._recorder.clock()
            peer.notify(Values(pull.origin, pull.step, pull.edge, was_offered=True), kept.payload)
            self._sent(step, pull.edge, peer.name, kept.count, len(kept.payload), began)

    def credited(self, credit: Credit, peer: Peer) -> None:
        """Free room in the window of a task, which credits values that it has taken."""
        with self._lock:
            self._outflow.credit(peer, credit.size_bytes)

    def begin(self, step: StepId) -> None:
        """See `Rendezvous.begin`."""
        with self._lock:
            self._rendezvous.begin(step)

    def count_from(self, number: int) -> None:
        """See `Rendezvous.count_from`, for this task's steps."""
        with self._lock:
            self._rendezvous.count_from(self._name, number)

    def finish(self, step: StepId) -> None:
        """End the step here as `Rendezvous.finish`, and decline the offers of its values."""
        with self._lock:
            commands = self._rendezvous.finish(step)
            reactions = self._inflow.ended(step)
        if commands or reactions:
            self._carry_out(commands, reactions)

    def abort(self, step: StepId, error: BaseException) -> None:
        """Abort the step: its waits end with `error`, and its values and offers are dropped."""
        with self._lock:
            commands = self._rendezvous.abort(step, error)
            reactions = self._inflow.ended(step)
            self._outflow.end_all(lambda offer: offer.step == step)
        self._carry_out(commands, reactions)

    def connection_lost(self, peer: Peer, error: DflowError) -> None:
        """End the waits for values of its task with `error`, since some may be lost; drop the offers over it."""
        with self._lock:
            commands = self._rendezvous.stop_waiting_for(peer.name, error)
            reactions = self._inflow.forget(lambda one: one is peer)
            self._outflow.forget(lambda one: one is peer)
        self._carry_out(commands, reactions)

    def task_left(self, task: str, error: DflowError) -> tuple[StepId, ...]:
        """End the waits for values of `task`, and the steps it started, with `error`; return these steps.

        Drops offers to and from it, and refuses its steps and values until `task_joined`.
        """
        with self._lock:
            steps = self._rendezvous.open_steps(task)
            commands = self._rendezvous.lose(task, error)
            reactions = self._inflow.forget(lambda peer: peer.name == task)
            reactions += [one for step in self._inflow.steps_of(task) for one in self._inflow.ended(step)]
            self._outflow.forget(lambda peer: peer.name == task)
            self._outflow.end_all(lambda offer: offer.step.origin == task)
        self._carry_out(commands, reactions)
        return steps

    def set_senders(self, count: int) -> None:
        """Set the number of tasks that may send to any one task; see `flow_control`."""
        with self._lock:
            self._outflow.senders = self._inflow.senders = max(1, count)

    def task_joined(self, task: str) -> None:
        """Accept steps and values of a task of this name again."""
        with self._lock:
            self._rendezvous.welcome(task)

    def has_left(self, task: str) -> bool:
        """Whether a task has left, and no task of its name has joined since."""
        with self._lock:
            return self._rendezvous.is_lost(task)

    def oldest_wait(self) -> str:
        """Describe the longest wait that has a deadline; empty when there is none."""
        with self._lock:
            _, oldest = min(self._waits(), key=lambda wait: wait[0], default=(0.0, None))
        if oldest is None:
            return ""
        step = describe(oldest.step)
        return f"waits for {short_task_name(oldest.source)} to send the value {oldest.edge!r} in {step}"

    @property
    def endless_waits(self) -> int:
        """Number of waits that their deadlines do not end: 0 whenever no call is in progress."""
        with self._lock:
            return self._deadlines.overdue()

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Messages, values and bytes sent since the start, per edge and destination."""
        with self._lock:
            sent = [*self._traffic.items()]
        return summed_by_edge(
            EdgeTraffic(edge, self._name, destination, count * messages, size_bytes, messages)
            for (edge, destination, count), (messages, size_bytes) in sent
        )

    def taken_in(self) -> dict[str, int]:
        """Bytes of values received since the start, by sending task."""
        with self._lock:
            return dict(self._taken_in)

    def statistics(self) -> RendezvousStatistics:
        """Present contents and counters of the rendezvous."""
        with self._lock:
            return self._rendezvous.statistics()

    def _waits(self) -> list[tuple[float, _Receiver]]:
        """Pairs of the time when a wait expires and the wait, for those with a deadline."""
        return [(one.ends_s, one) for one in self._rendezvous.waiters() if one.ends_s < math.inf]

    def _kept(self) -> list[tuple[float, Offered]]:
        """Pairs of the time when an offer expires and the offer, for those that are not answered."""
        return [(kept.ends_s, offer) for offer, kept in self._outflow.kept.items()]

    def _expire(self, receiver: _Receiver) -> None:
        step, edge = receiver.step, receiver.edge
        with self._lock:
            if not self._rendezvous.is_awaited(step, edge):
                return
        self._recorder.note(WAIT_EXPIRED, step, edge, receiver.source)
        text = (
            f"{short_task_name(self._name)} waited {self._deadlines.timeout_s:g} s in {describe(step)} for the value "
            f"{edge!r}, which {self._described(receiver.source)} should have sent\n  look there for an error, or allow "
            "a longer wait"
        )
        error = DeadlineExceeded(text + self._on_stall(text))
        with self._lock:
            commands = self._rendezvous.expire(step, edge, error)
        self._carry_out(commands)

    def _expire_offer(self, offer: Offered) -> None:
        with self._lock:
            kept = self._outflow.kept.pop(offer, None)
        if kept is not None:
            LOGGER.warning(
                "%s kept edge %r of %s for %s, which did not ask for it within %g s; it is dropped",
                *(self._name, offer.edge, describe(offer.step), offer.peer.name, self._offers.timeout_s),
            )

    def _carry_out(self, commands: Iterable[EndWait[_Receiver, _Held]], reactions: Iterable[Reaction] = ()) -> None:
        """Send credit and answers to offers, except over connections that have ended; then end the waits."""
        for peer, message in reactions:
            with contextlib.suppress(TransportClosed):
                peer.notify(message)
        for receiver, outcome in commands:
            try:
                receiver.end(outcome)
            except Exception:
                LOGGER.exception("%s: a receiver of edge %r failed", self._name, receiver.edge)
