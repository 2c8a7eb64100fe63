"""Connections between simulated processes: the real `Session` over streams that break, as sockets do.

Why: this replaces `transport.connection` and its recovery, whose threads and sockets cannot be simulated. Frames are
numbered, retained and resent by the same `Session` as on real hosts.

A stream carries packets in order. It breaks when the faults of the schedule say so, or when its sender gets no packet
through for `GIVE_UP_S`. Packets in flight may then be lost. The other end is notified if the network lets that through,
and otherwise finds out when it sends. The end that dialled dials again and states the number of the last frame that it
received; the other end answers with its own number, and both resend the missing frames. The connection ends if that
does not succeed within `Limits.resume_s`, or the longer time that tasks give.

Between tasks, notifications (values and cancellations) may arrive twice or out of order where the faults say so, as the
protocol allows. Such frames do not belong to the session. They are delivered only after the first frame of the session,
which introduces the sender.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.link import Frame, Kind, Limits
from dflow.distributed.transport.session import Session
from dflow.distributed.wire.codec import decode_message, joined
from dflow.tracing.errors import DeadlineExceeded, TransportClosed, WireError
from tests.simulation.faults import COORDINATOR
from tests.simulation.network import Network, Process

LIMITS = Limits()
#: Time without a packet getting through after which the sender regards the stream as broken.
GIVE_UP_S = 8.0
#: Interval between two attempts at a new stream, and the time limit of each.
RETRY_S = 0.3
#: Number of frames received after which an end sends an acknowledgement.
ACK_FRAMES = 6
#: Least time between arrivals on one connection, which keeps them in order: the seed orders events of equal times.
_HAIR_S = 1e-9


class _Said:
    """A frame that may have to be resent. `serial` is counted here to check `number`, which the session gives it."""

    __slots__ = ("frame", "number", "serial")

    def __init__(self, frame: Frame, serial: int) -> None:
        self.frame = frame
        self.serial = serial
        self.number = 0


class _Packet(NamedTuple):
    """A packet on a stream: a frame with an acknowledgement, or an acknowledgement alone."""

    stream: int
    acknowledged: int
    said: _Said | None


class SimulatedLink:
    """One end of a connection; see `link.FrameLink`. If `dials`, this end dials a new stream when one breaks."""

    def __init__(self, network: Network, near: Process, far: Process, resume_s: float, *, dials: bool) -> None:
        self.peer: Peer | None = None
        self.other: SimulatedLink
        self.is_closed = False
        self.said = self.heard = 0
        #: Frames outside the session that arrived before its first frame.
        self._early: list[Frame] = []
        self.near = near
        self._network = network
        self._far = far
        self._dials = dials
        self._resume_s = resume_s
        self._session: Session[_Said] = Session(ack_frames=ACK_FRAMES)
        #: The numbers of the current stream and of the newest one dialled.
        self._stream = self._dialled = 0
        self._is_up = True
        #: Deadline for a new stream; None while this end does not know of a break.
        self._resume_by_s: float | None = None
        self._last_arrival_s = 0.0
        self._between_tasks = COORDINATOR not in (near.host, far.host)
        near.links.append(self)

    @property
    def kept(self) -> int:
        """Number of frames retained until the other end acknowledges them."""
        return len(self._session.retained)

    # As a link.

    def send(self, frame: Frame) -> None:
        """See `link.FrameLink.send`."""
        if self.is_closed:
            raise TransportClosed("the connection is closed")
        if not self.near.is_alive:
            return
        if self.near.host == COORDINATOR:
            self._network.on_said(self._far, decode_message(frame.meta))
        if frame.payload:
            # Send the payload's present bytes: a simulated packet arrives later, and the sender may reuse the buffer.
            frame = msgspec.structs.replace(frame, payload=memoryview(bytearray(joined(frame.payload))))
        if self._between_tasks and frame.kind is Kind.NOTIFY and self._sends_apart(frame):
            return
        self.said += 1
        said = _Said(frame, self.said)
        said.number = self._session.send(said, len(frame.meta) + len(frame.payload))
        self._transmit(said)

    def send_with_next(self, frame: Frame) -> None:
        """See `link.FrameLink.send_with_next`."""
        self.send(frame)

    def flush(self) -> None:
        """See `link.FrameLink.flush`."""

    def close(self) -> None:
        """See `link.FrameLink.close`."""
        if self.is_closed:
            return
        self.is_closed = True
        self.near.links.remove(self)
        self._session.end()
        if not self.near.is_alive:
            return
        if self._is_up:
            self._tell_other(partial(self.other._close, "the other side closed the connection"))
        else:
            self._tell_other(partial(self.other._broke, self._stream, "the other side has closed the stream"))

    def process_ended(self, *, is_told: bool) -> None:
        """The process at this end has ended; the other end is notified if `is_told`."""
        if is_told:
            self._tell_other(partial(self.other._close, "the process at the other side ended"))
        self._is_up = False

    # On a stream.

    def _sends_apart(self, frame: Frame) -> bool:
        """Send a frame outside the session if it is to arrive out of order or twice; return True if out of order.

        For False, the caller sends the frame over the session: the only time, or the second time of two.
        """
        is_overtaken, events = self._network.is_overtaken(), self._network.events
        if not is_overtaken and not self._network.comes_twice():
            return False
        arrival_s = self._network.arrival(self.near.host, self._far.host, GIVE_UP_S)
        if arrival_s is not None:
            arrival_s += self._network.draw() if is_overtaken else 0.0
            events.at(arrival_s, lambda: self._reaches(partial(self.other._take_apart, frame)))
        return is_overtaken

    def _transmit(self, said: _Said | None) -> None:
        if not self._is_up:
            return
        stream = self._stream
        packet = _Packet(stream, self._session.say_received(), said)
        is_broken = self._network.breaks()
        if not is_broken or self._network.draw() < 0.5:
            self._put(partial(self.other._take, packet))
        if is_broken and self._is_up:
            self._is_up = False
            self.near.post(partial(self._broke, stream, "the stream was reset"))

    def _put(self, take: Callable[[], None]) -> None:
        """Schedule `take` at the other end, after all earlier ones; if nothing gets through, the stream breaks."""
        arrival_s = self._arrives_at()
        if arrival_s is not None:
            self._network.events.at(arrival_s, lambda: self._reaches(take))
            return
        self._is_up = False
        broke = partial(self._broke, self._stream, f"{self._far.host} acknowledged nothing for {GIVE_UP_S:g} s")
        self.near.after(GIVE_UP_S, broke)

    def _arrives_at(self) -> float | None:
        arrival_s = self._network.arrival(self.near.host, self._far.host, GIVE_UP_S)
        if arrival_s is not None:
            arrival_s = self._last_arrival_s = max(arrival_s, self._last_arrival_s + _HAIR_S)
        return arrival_s

    def _tell_other(self, what: Callable[[], None]) -> None:
        """Run `what` in the other end's process, as an operating system notifies its peer, if that gets through."""
        arrival_s = self._arrives_at()
        if arrival_s is not None:
            self._network.events.at(arrival_s, lambda: self._far.post(what))

    def _reaches(self, take: Callable[[], None]) -> None:
        if self.other.is_closed or not self._far.is_alive:
            self.near.post(partial(self._close, "the connection was reset by the other side"))
        else:
            self._far.post(take)

    def _take(self, packet: _Packet) -> None:
        if self.is_closed:
            return
        if packet.stream != self._stream or self._resume_by_s is not None:
            self._tell_other(partial(self.other._broke, packet.stream, "the other side has left the stream"))
            return
        said = packet.said
        try:
            self._session.acknowledge(packet.acknowledged)
            if said is None or not self._session.receive(said.number, len(said.frame.meta) + len(said.frame.payload)):
                return
        except WireError as error:
            self._network.on_misheard(self.near, f"finds the protocol broken: {error}")
            return
        self.heard += 1
        if said.serial != self.heard:
            self._network.on_misheard(self.near, f"hears what was said as number {said.serial} as number {self.heard}")
        self._arrived(said.frame)
        while self._early and not self.is_closed:
            self._arrived(self._early.pop(0))
        if self._session.ack_due and not self.is_closed:
            self._transmit(None)

    def _take_apart(self, frame: Frame) -> None:
        if self.other.said and not self.heard:
            self._early.append(frame)
        elif not self.is_closed:
            self._arrived(frame)

    def _arrived(self, frame: Frame) -> None:
        assert self.peer is not None
        if self.near.host != COORDINATOR:
            self.peer.arrived(frame)
            return
        message = decode_message(frame.meta)
        self._network.on_hearing(self._far, message)
        self.peer.arrived(frame)
        self._network.on_heard(self._far, message)

    def _close(self, reason: str) -> None:
        if self.peer is not None:
            self.peer.close(reason)

    # From one stream to the next.

    def _broke(self, stream: int, reason: str) -> None:
        """This end learns that a stream has broken; it dials another, or waits for the other end to dial."""
        if self.is_closed or stream != self._stream or self._resume_by_s is not None:
            return
        self._is_up = False
        self._resume_by_s = self._network.events.now_s + self._resume_s
        self._tell_other(partial(self.other._broke, stream, "the other side has left the stream"))
        if self._dials:
            self._dial(stream, reason)
        else:
            # Routine: tasks wait for each other longer than the simulation runs on.
            self.near.after(self._resume_s, partial(self._too_late, stream, reason), is_routine=True)

    def _too_late(self, stream: int, reason: str) -> None:
        if stream == self._stream:
            self._close(f"{reason}, and the other side did not come back within {self._resume_s:g} s")

    def _dial(self, stream: int, reason: str) -> None:
        """Dial a new stream every `RETRY_S` until one is answered or the deadline has passed."""
        if self.is_closed or self._resume_by_s is None or stream != self._stream:
            return
        if self._network.events.now_s >= self._resume_by_s:
            self._close(f"{reason}, and it could not be reached again within {self._resume_s:g} s")
            return
        self._dialled += 1
        offered = partial(self.other._offered, self._dialled, self._session.received)
        arrival_s = self._network.arrival(self.near.host, self._far.host, GIVE_UP_S)
        if arrival_s is not None and not self._network.breaks():
            self._network.events.at(arrival_s, lambda: self._reaches(offered))
        self.near.after(RETRY_S, partial(self._dial, stream, reason))

    def _offered(self, stream: int, peer_received: int) -> None:
        """The other end has dialled a new stream, and has received all frames up to `peer_received`."""
        if self.is_closed or stream <= self._stream:
            return
        self._session.resume(peer_received)
        again = [kept.item for kept in self._session.retained]
        self._goes_on(stream)
        self._put(partial(self.other._answered, stream, self._session.received))
        for said in again:
            self._transmit(said)

    def _answered(self, stream: int, peer_received: int) -> None:
        """The other end has accepted the new stream, and has received all frames up to `peer_received`."""
        if self.is_closed or stream != self._dialled or self._resume_by_s is None:
            return
        self._session.resume(peer_received)
        again = [kept.item for kept in self._session.retained]
        self._goes_on(stream)
        for said in again:
            self._transmit(said)

    def _goes_on(self, stream: int) -> None:
        self._network.resumed += 1
        self._stream, self._is_up, self._resume_by_s = stream, True, None


class SimulatedListener:
    """A listening address of a simulated process; see `base.Listener`."""

    def __init__(self, process: Process, address: str, name: str, handler: Handler) -> None:
        self.address = address
        self.name = name
        self.handler = handler
        self._process = process
        process.listeners[address] = self

    def close(self) -> None:
        """Stop listening."""
        self._process.listeners.pop(self.address, None)


class SimulatedTransport:
    """The transport of one simulated process; see `base.Transport`."""

    def __init__(self, network: Network, process: Process, connections: Connections) -> None:
        self._network = network
        self._process = process
        self._connections = connections

    def listen(self, address: str, *, name: str, handler: Handler, resume_s: float | None = None) -> SimulatedListener:
        """Accept connections; an empty `address` is replaced by one that only this life of the process has."""
        process = self._process
        address = address or f"{process.host}#{process.life}.{len(process.listeners)}"
        return SimulatedListener(process, address, name, handler)

    def connect(
        self,
        address: str,
        *,
        name: str,
        handler: Handler,
        who: str,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        resume_s: float | None = None,
    ) -> Peer:
        """Connect now, without retries, which the caller makes.

        raises  DeadlineExceeded when the listener at `address` cannot be reached now
        """
        network, source = self._network, self._process
        host, _, _ = address.partition("#")
        target = network.reached(source.host, host)
        listener = None if target is None else target.listeners.get(address)
        if target is None or listener is None:
            raise DeadlineExceeded(f"{who} at {address} could not be reached from {source}")
        resumes_s = LIMITS.resume_s if resume_s is None else resume_s
        ours = SimulatedLink(network, source, target, resumes_s, dials=True)
        theirs = SimulatedLink(network, target, source, resumes_s, dials=False)
        ours.other, theirs.other = theirs, ours
        ours.peer = Peer(ours, local=name, remote=listener.name, handler=handler, limits=LIMITS)
        theirs.peer = Peer(theirs, local=listener.name, remote=name, handler=listener.handler, limits=LIMITS)
        self._connections.append(ours)
        return ours.peer


class Connections(list[SimulatedLink]):
    """All connections made in a schedule, each as the end that dialled."""

    def far(self, peer: Peer) -> str:
        """Return the process at the other end of a connection; empty if `peer` is not the dialling end of one."""
        return next((str(link.other.near) for link in reversed(self) if link.peer is peer), "")

    def unheard(self) -> str:
        """Describe a frame that was sent over an open connection and not received; meant for an idle network."""
        for link in self:
            for end in (link, link.other):
                other = end.other
                if end.is_closed or other.is_closed or not end.near.is_alive or not other.near.is_alive:
                    continue
                if other.heard != end.said:
                    return f"{other.near} heard {other.heard} of {end.said} frames that {end.near} sent"
        return ""

    def overfull(self) -> str:
        """Describe an end of an open connection that retains more frames than the other may leave unacknowledged."""
        for link in self:
            for end in (link, link.other):
                is_open = not end.is_closed and not end.other.is_closed and end.other.near.is_alive
                if is_open and end.near.is_alive and end.kept > ACK_FRAMES:
                    return f"{end.near} keeps {end.kept} frames for {end.other.near}, above {ACK_FRAMES}"
        return ""
