"""Hosts and the connections between them, as the script of a schedule has them.

Why: the code under test is everything above `exchange.Link`. This stands for the system's sockets and for the
wires: packets are lost and sent again, come late, wait while two hosts are cut off from each other, and a connection
that gets nothing through is given up by its sender. The other end of it learns that when it sends something itself.

Invariants: what a link carries comes in order and once, but for what the script lets come twice or be overtaken,
values and cancellations between tasks, which the protocol says may come in any order; what a process does, it does
one thing after another.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from dflow.distributed.codec import decode_message
from dflow.distributed.messages import AnyMessage
from dflow.distributed.simulation.events import EventQueue
from dflow.distributed.simulation.faults import COORDINATOR, Faults
from dflow.distributed.transport.base import Handler, Limits
from dflow.distributed.transport.exchange import Exchange, Frame, Kind
from dflow.tracing.errors import DeadlineExceeded, TransportClosed

#: From one host to another, in s, without faults; and how much more a single packet may take.
LATENCY_S = 0.0005
JITTER_S = 0.0005
#: A lost packet is sent again after so long, and after twice as long each time.
RESEND_S = 0.2
#: A sender that gets nothing through for so long gives the connection up.
GIVE_UP_S = 8.0
#: What handling one message costs a process.
HANDLING_S = 0.0001
LIMITS = Limits()


class Process:
    """One life of a host's process: what it does, it does one after another while it lives."""

    def __init__(self, network: Network, host: str, life: int) -> None:
        self.host = host
        self.life = life
        self.is_alive = True
        self.links: list[SimulatedLink] = []
        self.listeners: dict[str, SimulatedListener] = {}
        self.on_end: list[Callable[[], None]] = []
        self._network = network
        self._cost_s = HANDLING_S * network.slowness(host)
        self._inbox: deque[Callable[[], None]] = deque()
        self._free_at_s = 0.0
        self._is_draining = False

    def __str__(self) -> str:
        return self.host if self.life == 0 else f"{self.host}'{self.life}"

    def post(self, do: Callable[[], None]) -> None:
        """Do it when all before it is done, if the process lives then."""
        self._inbox.append(do)
        if self._is_draining or not self.is_alive:
            return
        if self._free_at_s <= self._network.events.now_s:
            self._drain()
        else:
            self._drain_later()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Do it in `delay_s`."""
        self._network.events.after(delay_s, lambda: self.post(do))

    def hang(self, until_s: float) -> None:
        """Do nothing until then."""
        self._free_at_s = max(self._free_at_s, until_s)

    def _drain_later(self) -> None:
        self._is_draining = True
        self._network.events.at(self._free_at_s, self._drain)

    def _drain(self) -> None:
        if not self.is_alive:
            return
        now_s = self._network.events.now_s
        if self._free_at_s <= now_s:
            self._is_draining = True
            self._free_at_s = now_s + self._cost_s
            self._network.active = self.host
            try:
                self._inbox.popleft()()
            except Exception as error:
                self._network.on_raised(self, error)
        if self._inbox:
            self._drain_later()
        else:
            self._is_draining = False


class Network:
    """The hosts of one schedule.

    `on_said`               is called with what the coordinator sends, and to whom, before it is on its way
    `on_hearing, on_heard`  are called with what the coordinator gets, and from whom, before and after it handles it
    `on_raised`             is called with an error that a process did not handle
    """

    def __init__(self, events: EventQueue, seed: int, faults: Faults) -> None:
        self.events = events
        self.on_said: Callable[[Process, AnyMessage], None] = _nothing
        self.on_raised: Callable[[Process, Exception], None] = _nothing
        self.on_hearing: Callable[[Process, AnyMessage], None] = _nothing
        self.on_heard: Callable[[Process, AnyMessage], None] = _nothing
        #: The host that did something last.
        self.active = COORDINATOR
        self._faults = faults
        self._random = random.Random(f"network {seed}")
        self._processes: dict[str, Process] = {}
        self._lives: dict[str, int] = {}

    def start(self, host: str) -> Process:
        """A new life of the host's process."""
        life = self._lives.get(host, -1) + 1
        self._lives[host] = life
        self._processes[host] = Process(self, host, life)
        return self._processes[host]

    def end(self, process: Process, *, is_told: bool) -> None:
        """End a process; the other ends of its connections learn it at once, or when they next send."""
        if not process.is_alive:
            return
        process.is_alive = False
        for end in process.on_end:
            end()
        for link in process.links:
            link.process_ended(is_told=is_told)

    def process(self, host: str) -> Process:
        """The newest life of the host's process."""
        return self._processes[host]

    def slowness(self, host: str) -> float:
        """How many times as long as others the host takes."""
        return max([1.0, *(slow.factor for slow in self._faults.slow if slow.host == host)])

    def connect(self, source: Process, address: str, name: str, handler: Handler, who: str) -> Exchange:
        """A connection to what listens at `address`; raises DeadlineExceeded when that cannot be reached now."""
        host, _, _ = address.partition("#")
        target = self._processes.get(host)
        listener = target.listeners.get(address) if target is not None and target.is_alive else None
        if target is None or listener is None or self.cut_until(source.host, host) is not None:
            raise DeadlineExceeded(f"{who} at {address} could not be reached from {source}")
        ours, theirs = SimulatedLink(self, source, target), SimulatedLink(self, target, source)
        ours.other, theirs.other = theirs, ours
        near = Exchange(ours, local=name, remote=listener.name, handler=handler, limits=LIMITS)
        ours.exchange = near
        theirs.exchange = Exchange(theirs, local=listener.name, remote=name, handler=listener.handler, limits=LIMITS)
        return near

    def cut_until(self, one: str, other: str) -> float | None:
        """When two hosts that are cut off from each other now will not be; None when they are not."""
        now_s, pair = self.events.now_s, {one, other}
        ends = [
            cut.at_s + cut.for_s
            for cut in self._faults.cut
            if {cut.one, cut.other} == pair and cut.at_s <= now_s < cut.at_s + cut.for_s
        ]
        return max(ends, default=None)

    def arrival(self, source: str, destination: str) -> float | None:
        """When what is sent now arrives; None when the sender gives up before."""
        now_s, draw, faults = self.events.now_s, self._random, self._faults
        delay_s = (LATENCY_S + draw.random() * JITTER_S) * max(self.slowness(source), self.slowness(destination))
        if faults.late and draw.random() < faults.late:
            delay_s += draw.random()
        resend_s = RESEND_S
        while faults.loss and draw.random() < faults.loss:
            delay_s, resend_s = delay_s + resend_s, resend_s * 2
        cut_until_s = self.cut_until(source, destination)
        if cut_until_s is not None:
            delay_s += cut_until_s - now_s + draw.random() * RESEND_S
        return now_s + delay_s if delay_s < GIVE_UP_S else None

    def comes_twice(self) -> bool:
        """Whether this value comes twice."""
        return self._faults.twice > 0 and self._random.random() < self._faults.twice

    def is_overtaken(self) -> bool:
        """Whether what is sent after this value may come before it."""
        return self._faults.mixed > 0 and self._random.random() < self._faults.mixed


def _nothing(process: Process, what: object) -> None:
    pass


class SimulatedLink:
    """One end of a connection; see `exchange.Link`."""

    def __init__(self, network: Network, near: Process, far: Process) -> None:
        self.exchange: Exchange | None = None
        self.other: SimulatedLink | None = None
        self._network = network
        self._near = near
        self._far = far
        self._is_closed = False
        self._is_broken = False
        self._last_arrival_s = 0.0
        self._between_tasks = COORDINATOR not in (near.host, far.host)
        near.links.append(self)

    def send(self, frame: Frame) -> None:
        """See `exchange.Link.send`."""
        if self._is_closed:
            raise TransportClosed("the connection is closed")
        if not self._near.is_alive or self._is_broken:
            return
        if self._near.host == COORDINATOR:
            self._network.on_said(self._far, decode_message(frame.meta))
        frame = frame._replace(payload=memoryview(bytearray(frame.payload)))
        arrival_s = self._network.arrival(self._near.host, self._far.host)
        if arrival_s is None:
            self._give_up()
            return
        if self._between_tasks and frame.kind is Kind.NOTIFY:
            if self._network.comes_twice():
                self._network.events.at(arrival_s, lambda: self._arrives(frame))
            if self._network.is_overtaken():
                self._network.events.after(self._network._random.random(), lambda: self._arrives(frame))
                return
        # A hair later than what was sent before: of equal times the seed would choose.
        self._last_arrival_s = max(arrival_s, self._last_arrival_s + 1e-9)
        self._network.events.at(self._last_arrival_s, lambda: self._arrives(frame))

    def close(self) -> None:
        """See `exchange.Link.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._near.links.remove(self)
        if self._near.is_alive:
            self._tell_other("the other side closed the connection")

    def process_ended(self, *, is_told: bool) -> None:
        """The process at this end is no more."""
        self._is_broken = True
        if is_told:
            self._tell_other("the process at the other side ended")

    def _give_up(self) -> None:
        """Nothing gets through: what is on its way is lost, and this end learns it after a while."""
        self._is_broken = True
        reason = f"{self._far.host} acknowledged nothing for {GIVE_UP_S:g} s"
        self._network.events.after(GIVE_UP_S, lambda: self._near.post(lambda: self._close(reason)))

    def _tell_other(self, reason: str) -> None:
        """Let the other end learn the end of the connection, behind what was sent before, if that can get through."""
        other = self.other
        arrival_s = self._network.arrival(self._near.host, self._far.host)
        if other is not None and arrival_s is not None:
            arrival_s = self._last_arrival_s = max(arrival_s, self._last_arrival_s + 1e-9)
            self._network.events.at(arrival_s, lambda: self._far.post(lambda: other._close(reason)))

    def _arrives(self, frame: Frame) -> None:
        other = self.other
        if self._is_broken and self._near.is_alive:
            return
        if other is None or other._is_closed or other._is_broken or not self._far.is_alive:
            self._near.post(lambda: self._close("the connection was reset by the other side"))
            return
        self._far.post(lambda: other._take(frame))

    def _take(self, frame: Frame) -> None:
        if self.exchange is None or self._is_closed:
            return
        if self._near.host != COORDINATOR:
            self.exchange.arrived(frame)
            return
        message = decode_message(frame.meta)
        self._network.on_hearing(self._far, message)
        self.exchange.arrived(frame)
        self._network.on_heard(self._far, message)

    def _close(self, reason: str) -> None:
        if self.exchange is not None:
            self.exchange.close(reason)


class SimulatedListener:
    """A place where others connect; see `base.Listener`."""

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
    """The way in which one process reaches others; see `base.Transport`."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def listen(self, address: str, *, name: str, handler: Handler) -> SimulatedListener:
        """Take connections; the address is one of this life of the process."""
        process = self._process
        address = address or f"{process.host}#{process.life}.{len(process.listeners)}"
        return SimulatedListener(process, address, name, handler)

    def connect(self, address: str, *, name: str, handler: Handler, who: str, timeout_s: float) -> Exchange:
        """Connect now or not at all: the script says when to try again."""
        return self._network.connect(self._process, address, name, handler, who)
