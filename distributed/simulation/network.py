"""Hosts and the wires between them, as the script of a schedule has them.

Why: packets are lost and sent again, come late, and wait while two hosts are cut off from each other. `link` makes
connections of that.

Invariant: what a process does, it does one thing after another.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dflow.distributed.messages import AnyMessage
from dflow.distributed.simulation.events import EventQueue
from dflow.distributed.simulation.faults import COORDINATOR, Faults
from dflow.distributed.transport.base import Handler

#: From one host to another, in s, without faults; and how much more a single packet may take.
LATENCY_S = 0.0005
JITTER_S = 0.0005
#: A lost packet is sent again after so long, and after twice as long each time.
RESEND_S = 0.2
#: What handling one message costs a process.
HANDLING_S = 0.0001


class End(Protocol):
    """One end of a connection."""

    def process_ended(self, *, is_told: bool) -> None:
        """The process at this end is no more."""
        ...


class Listening(Protocol):
    """A place where others connect."""

    name: str
    handler: Handler


class Process:
    """One life of a host's process: what it does, it does one after another while it lives."""

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
        """Do it when all before it is done, if the process lives then."""
        self._inbox.append(do)
        if self._is_draining or not self.is_alive:
            return
        if self._free_at_s <= self._network.events.now_s:
            self._drain()
        else:
            self._drain_later()

    def after(self, delay_s: float, do: Callable[[], None], *, is_routine: bool = False) -> None:
        """Do it in `delay_s`; see `EventQueue` for what is routine."""
        self._network.events.after(delay_s, lambda: self.post(do), is_routine=is_routine)

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
    `on_misheard`           is called when a process hears something in the wrong order, or twice
    """

    def __init__(self, events: EventQueue, seed: int, faults: Faults) -> None:
        self.events = events
        self.on_said: Callable[[Process, AnyMessage], None] = _nothing
        self.on_raised: Callable[[Process, Exception], None] = _nothing
        self.on_misheard: Callable[[Process, str], None] = _nothing
        self.on_hearing: Callable[[Process, AnyMessage], None] = _nothing
        self.on_heard: Callable[[Process, AnyMessage], None] = _nothing
        #: The host that did something last.
        self.active = COORDINATOR
        #: How often an end of a connection has gone on with a new stream.
        self.resumed = 0
        self._faults = faults
        self._random = random.Random(f"network {seed}")
        self._processes: dict[str, Process] = {}
        self._lives: dict[str, int] = {}
        self._slowness: dict[str, float] = {}
        for slow in faults.slow:
            self._slowness[slow.host] = max(slow.factor, self.slowness(slow.host))

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
        return self._slowness.get(host, 1.0)

    def reached(self, source: str, host: str) -> Process | None:
        """The live process of the host, if it can be reached from `source` now."""
        target = self._processes.get(host)
        is_there = target is not None and target.is_alive and self.cut_until(source, host) is None
        return target if is_there else None

    def cut_until(self, one: str, other: str) -> float | None:
        """When two hosts that are cut off from each other now will not be; None when they are not."""
        if not self._faults.cut:
            return None
        now_s, pair = self.events.now_s, {one, other}
        ends = [
            cut.at_s + cut.for_s
            for cut in self._faults.cut
            if {cut.one, cut.other} == pair and cut.at_s <= now_s < cut.at_s + cut.for_s
        ]
        return max(ends, default=None)

    def arrival(self, source: str, destination: str, within_s: float = math.inf) -> float | None:
        """When what is sent now arrives; None when that is not `within_s`."""
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
        """Whether this value comes twice."""
        return self._faults.twice > 0 and self._random.random() < self._faults.twice

    def is_overtaken(self) -> bool:
        """Whether what is sent after this value may come before it."""
        return self._faults.mixed > 0 and self._random.random() < self._faults.mixed

    def breaks(self) -> bool:
        """Whether the stream that carries this packet breaks."""
        return self._faults.breaks > 0 and self._random.random() < self._faults.breaks

    def draw(self) -> float:
        """A number from 0 to 1."""
        return self._random.random()


def _nothing(process: Process, what: object) -> None:
    pass
