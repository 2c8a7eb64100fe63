"""The simulated hosts and the network between them, with the faults of a schedule.

Why: packets are lost and resent, arrive late, or are delayed while two hosts are cut off from each other. `link` builds
connections on this.

Invariant: a process runs one callback after another, never two concurrently.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dflow.distributed.transport.base import Handler
from dflow.distributed.wire.messages.message import Message
from tests.simulation.events import EventQueue
from tests.simulation.faults import COORDINATOR, Faults

#: Time of a packet from one host to another without faults, and the most that is added to it at random.
LATENCY_S = 0.0005
JITTER_S = 0.0005
#: Time after which a lost packet is resent; it doubles each time.
RESEND_S = 0.2
#: Longest time until a new thread of a process begins.
LATE_S = 3.0
#: Time that a process takes to handle one message.
HANDLING_S = 0.0001


class End(Protocol):
    """One end of a connection."""

    def process_ended(self, *, is_told: bool) -> None:
        """The process at this end has ended; the other end is notified if `is_told`."""
        ...


class Listening(Protocol):
    """An address that accepts connections."""

    name: str
    handler: Handler


class Process:
    """One life of a host's process, from a start to its end. It runs its callbacks in order while it is alive."""

    def __init__(self, network: Network, host: str, life: int) -> None:
        self.host = host
        self.life = life
        self.is_alive = True
        self.links: list[End] = []
        self.listeners: dict[str, Listening] = {}
        self.on_end: list[Callable[[], None]] = []
        self._network = network
        self._cost_s = HANDLING_S * network.slowness(host)
        self._inbox: deque[Callable[[], None]] = deque()
        self._free_at_s = 0.0
        self._is_draining = False

    def __str__(self) -> str:
        return self.host if self.life == 0 else f"{self.host}'{self.life}"

    def post(self, do: Callable[[], None]) -> None:
        """Run `do` after all callbacks posted before it, if the process is then alive."""
        self._inbox.append(do)
        if self._is_draining or not self.is_alive:
            return
        if self._free_at_s <= self._network.events.now_s:
            self._drain()
        else:
            self._drain_later()

    def after(self, delay_s: float, do: Callable[[], None], *, is_routine: bool = False) -> None:
        """Post `do` after `delay_s`; see `EventQueue` for `is_routine`."""
        self._network.events.after(delay_s, lambda: self.post(do), is_routine=is_routine)

    def hang(self, until_s: float) -> None:
        """Run no callback before `until_s`."""
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
    """The hosts of one schedule. Its callbacks:

    `on_said`               a message that the coordinator sends, with its receiver, before it is sent
    `on_hearing, on_heard`  a message that the coordinator receives, with its sender, before and after its handling
    `on_raised`             an error that a process did not handle
    `on_misheard`           a process received a frame out of order or twice
    """

    def __init__(self, events: EventQueue, seed: int, faults: Faults) -> None:
        self.events = events
        self.on_said: Callable[[Process, Message], None] = _nothing
        self.on_raised: Callable[[Process, Exception], None] = _nothing
        self.on_misheard: Callable[[Process, str], None] = _nothing
        self.on_hearing: Callable[[Process, Message], None] = _nothing
        self.on_heard: Callable[[Process, Message], None] = _nothing
        #: The host whose process ran a callback last.
        self.active = COORDINATOR
        #: Number of times that an end of a connection continued over a new stream.
        self.resumed = 0
        self._faults = faults
        self._random = random.Random(f"network {seed}")
        self._processes: dict[str, Process] = {}
        self._lives: dict[str, int] = {}
        self._slowness: dict[str, float] = {}
        for slow in faults.slow:
            self._slowness[slow.host] = max(slow.factor, self.slowness(slow.host))

    def start(self, host: str) -> Process:
        """Start a new life of the host's process."""
        life = self._lives.get(host, -1) + 1
        self._lives[host] = life
        self._processes[host] = Process(self, host, life)
        return self._processes[host]

    def end(self, process: Process, *, is_told: bool) -> None:
        """End a process; its peers are notified now if `is_told`, and otherwise find out when they next send."""
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
        """Return how many times longer the host takes than others."""
        return self._slowness.get(host, 1.0)

    def reached(self, source: str, host: str) -> Process | None:
        """Return the live process of the host if `source` can reach it now, else None."""
        target = self._processes.get(host)
        is_there = target is not None and target.is_alive and self.cut_until(source, host) is None
        return target if is_there else None

    def cut_until(self, one: str, other: str) -> float | None:
        """Return the time until which two hosts are cut off from each other; None if they are not cut off now."""
        if not self._faults.cut:
            return None
        now_s, pair = self.events.now_s, {one, other}
        cuts = [cut.end_s for cut in self._faults.cut if {*cut.hosts} == pair and cut.at_s <= now_s < cut.end_s]
        return max(cuts, default=None)

    def arrival(self, source: str, destination: str, within_s: float = math.inf) -> float | None:
        """Return the arrival time of a packet sent now; None if it takes `within_s` or longer."""
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
        return now_s + delay_s if delay_s < within_s else None

    def comes_twice(self) -> bool:
        """Decide at random whether a value arrives twice."""
        return self._faults.twice > 0 and self._random.random() < self._faults.twice

    def is_overtaken(self) -> bool:
        """Decide at random whether later messages may overtake a value."""
        return self._faults.mixed > 0 and self._random.random() < self._faults.mixed

    def breaks(self) -> bool:
        """Decide at random whether a stream breaks on a packet."""
        return self._faults.breaks > 0 and self._random.random() < self._faults.breaks

    def late_start_s(self) -> float:
        """Draw the time until a new thread of a process begins, which is mostly 0."""
        return self._random.random() * LATE_S if self._random.random() < 0.2 else 0.0

    def draw(self) -> float:
        """Draw a random number from 0 to 1."""
        return self._random.random()


def _nothing(process: Process, what: object) -> None:
    pass
