"""How long steps take on clusters of any size: fetch from every ps, compute, send an update to every ps, go on.

What is simulated of each message: the hop, the processor of the ps, which takes one message after another, the way out
of the ps's network card and the way into the worker's, which carry one after another too. Not simulated: switches,
memory, what the operating system does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from dflow.distributed.simulation.at_size.hardware import Computing, Hardware
from dflow.distributed.simulation.at_size.queues import Times, served


@dataclass(frozen=True)
class Step:
    """What a worker fetches from all ps tasks together, and sends to them, in bytes; in how many messages per ps.

    `is_sparse`  whether it is rows of a table, which are two arrays: indices and values
    """

    fetch_bytes: float = 0.0
    update_bytes: float = 0.0
    is_sparse: bool = False

    @property
    def messages(self) -> int:
        """Arrays per ps and direction."""
        return 2 if self.is_sparse else 1


@dataclass(frozen=True)
class Shape:
    """How many tasks, and how they wait for each other.

    `backups`   so many of the workers are not waited for in a synchronous step
    """

    workers: int
    ps: int
    is_synchronous: bool = True
    backups: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.backups < self.workers:
            raise ValueError(f"{self.backups} of {self.workers} workers are backups; at least one has to be waited for")


NULL = Computing(0.0)


class Cluster:
    """One simulated cluster. The same seed gives the same times."""

    def __init__(self, hardware: Hardware, shape: Shape, computing: Computing = NULL, seed: int = 0) -> None:
        self._hardware = hardware
        self._shape = shape
        self._computing = computing
        self._random = np.random.default_rng(seed)

    def synchronous(self, step: Step, steps: int) -> Times:
        """The times of `steps` steps, float64[steps] in s: each ends when enough workers have sent their updates."""
        return np.array([self._synchronous_step(step) for _ in range(steps)])

    def asynchronous(self, step: Step, steps: int) -> Times:
        """Each worker's times of its steps, float64[steps, workers] in s: no worker waits for another.

        Transfers are served in the order in which workers begin them, over all ps tasks at once.
        """
        shape, computed = self._shape, self._computed((steps, self._shape.workers))
        begins = self._random.random(shape.workers) * max(self._computing.median_s, 1e-3)
        events = [(float(at_s), worker, True) for worker, at_s in enumerate(begins)]
        heapq.heapify(events)
        out_free_s, in_free_s = np.zeros(shape.ps), np.zeros(shape.ps)
        times, done, begun = np.zeros_like(computed), np.zeros(shape.workers, np.int64), np.array(begins)
        while events:
            at_s, worker, is_fetch = heapq.heappop(events)
            if is_fetch:
                fetched_s = self._transferred(at_s, step.fetch_bytes, step, out_free_s)
                fetched_s += self._hardware.sparse_s if step.is_sparse else 0.0
                overlap_s = self._computing.hidden * (fetched_s - at_s)
                sends_s = fetched_s - overlap_s + computed[done[worker], worker]
                heapq.heappush(events, (max(sends_s, fetched_s), worker, False))
                continue
            applied_s = self._transferred(at_s, step.update_bytes, step, in_free_s)
            # What is hidden of it goes on in the next step, whose fetch waits behind it where they meet.
            ended_s = applied_s - self._computing.hidden * (applied_s - at_s)
            times[done[worker], worker] = ended_s - begun[worker]
            done[worker] += 1
            begun[worker] = ended_s
            if done[worker] < steps:
                heapq.heappush(events, (ended_s, worker, True))
        return times

    def _transferred(self, at_s: float, size_bytes: float, step: Step, free_s: Times) -> float:
        """When what one worker exchanges with all ps tasks is there; `free_s`, float64[ps], is when each can begin."""
        hardware = self._hardware
        each_s = size_bytes / self._shape.ps / hardware.link_bytes_per_s
        begins = np.maximum(at_s + self._hops(free_s.shape), free_s)
        np.copyto(free_s, begins + max(each_s, step.messages * hardware.message_s))
        # All of it passes the worker's own network card too.
        return float(max(free_s.max(), begins.min() + each_s * self._shape.ps) + self._hops((1,))[0])

    def _synchronous_step(self, step: Step) -> float:
        updated = self._updated(self._hops((self._shape.workers,)), step)
        told = served((updated + self._hops(updated.shape))[None], self._hardware.message_s)[0]
        wanted = self._shape.workers - self._shape.backups
        return float(np.partition(told, wanted - 1)[wanted - 1] + self._hops((1,))[0])

    def _updated(self, starts: Times, step: Step) -> Times:
        """When each worker has the word of all ps tasks that its update is applied."""
        fetched = self._fetched(starts, step)
        hidden_s = self._computing.hidden * (fetched - starts)
        return self._sent(fetched - hidden_s + self._computed(starts.shape), step)

    def _fetched(self, starts: Times, step: Step) -> Times:
        """When each worker has what it fetches."""
        hardware, shape = self._hardware, (self._shape.ps, self._shape.workers)
        asked = served(starts + self._hops(shape), step.messages * hardware.message_s)
        each_s = step.fetch_bytes / shape[0] / hardware.link_bytes_per_s
        arrived, waited_s = self._carried(asked, each_s)
        fetched: Times = arrived.max(axis=0)
        if hardware.incast_s and each_s:
            fetched = fetched + hardware.incast_s * (waited_s.max(axis=0) > hardware.incast_senders * each_s)
        return fetched + (hardware.sparse_s if step.is_sparse else 0.0)

    def _sent(self, computed: Times, step: Step) -> Times:
        """When each worker knows that its update is applied everywhere."""
        hardware, shape = self._hardware, (self._shape.ps, self._shape.workers)
        each_s = step.update_bytes / shape[0] / hardware.link_bytes_per_s
        left = np.broadcast_to(computed[:, None], shape[::-1])
        arrived, _ = self._carried(left, each_s)
        applied = served(np.ascontiguousarray(arrived.T), step.messages * hardware.message_s)
        done: Times = (applied + self._hops(shape)).max(axis=0)
        return done - self._computing.hidden * np.maximum(0.0, done - computed)

    def _carried(self, ready: Times, each_s: float) -> tuple[Times, Times]:
        """When messages are at their receivers, and how long each waited to be let in there.

        `ready` is float64[senders, receivers] in s, when each is there to be sent, and the results are float64[senders,
        receivers]. A message goes in at the receiver while it still goes out at the sender.
        """
        hops = self._hops(ready.shape)
        if not each_s:
            return ready + hops, np.zeros_like(ready)
        out = served(ready, each_s) + hops
        let_in = served(np.ascontiguousarray((out - each_s).T), each_s).T
        return np.maximum(let_in, out), let_in - out

    def _computed(self, shape: tuple[int, ...]) -> Times:
        computing, random = self._computing, self._random
        if not computing.median_s:
            return np.zeros(shape)
        is_slow = random.random(shape) < computing.slow_fraction
        longer = 1 + is_slow * random.exponential(max(computing.slow_mean, 1e-12), shape)
        times: Times = computing.median_s * np.exp(computing.spread * random.standard_normal(shape)) * longer
        return times

    def _hops(self, shape: tuple[int, ...]) -> Times:
        hardware = self._hardware
        hops: Times = hardware.hop_s * np.exp(hardware.hop_spread * self._random.standard_normal(shape))
        return hops
