"""Step times on clusters of any size: a worker fetches from every ps, computes, and sends an update to every ps.

Simulated for each message: the hop, the processor of the ps, and both network cards; the processor and each card handle
one message at a time. Not simulated: switches, memory, the operating system.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


MB = 1e6
GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """Links and servers; each task has its own machine.

    `link_bytes_per_s`  bandwidth of a task's network card in each direction
    `hop_s`             latency from one task to another, for an empty message
    `hop_spread`        sigma of the log-normal factor of each hop
    `message_s`         processor time of a ps task for each message; it handles one at a time
    `sparse_s`          time of a worker for a sparse lookup, besides its messages
    `incast_s`          time lost when more than `incast_senders` senders meet at one network card
    """

    link_bytes_per_s: float
    hop_s: float
    message_s: float
    hop_spread: float = 0.2
    sparse_s: float = 0.0
    incast_s: float = 0.0
    incast_senders: int = 8


@dataclass(frozen=True)
class Computing:
    """The computing time of a worker's step, without transfers.

    `median_s`       median of steps that are not slow
    `spread`         sigma of the log-normal factor of each step
    `slow_fraction`  fraction of a worker's steps that are slow
    `slow_mean`      mean extra time of a slow step, exponentially distributed, as a fraction of the step's usual time
    `hidden`         fraction of the transfer time that overlaps with computing
    """

    median_s: float
    spread: float = 0.0
    slow_fraction: float = 0.0
    slow_mean: float = 0.0
    hidden: float = 0.0


#: Section 6.2 of the OSDI 2016 paper. Fitted: to scalar (1.8 and 8.8 ms) `hop_s` and `message_s`; to dense with 1
#: worker (147 ms and 1.01 s) `link_bytes_per_s` and `incast_s`; to sparse with 1 worker (5 ms) `sparse_s`.
PAPER = Hardware(link_bytes_per_s=1.043 * GB, hop_s=202e-6, message_s=43e-6, sparse_s=3.1e-3, incast_s=49e-3)

#: Inception-v3 with one K40 GPU per worker, section 6.3 of the paper, over the links of `PAPER`. `spread` is assumed;
#: the rest is fitted to the step time of 50 workers with 0, 3 and 4 backups, and to 2,300 images/s of 200 workers.
PAPER_INCEPTION = Computing(median_s=1.668, spread=0.05, slow_fraction=0.086, slow_mean=0.161, hidden=0.672)


@dataclass(frozen=True)
class Step:
    """The transfers of a worker's step, in bytes summed over all ps tasks.

    `is_sparse`  whether they are rows of a table, which are two arrays: indices and values
    """

    fetch_bytes: float = 0.0
    update_bytes: float = 0.0
    is_sparse: bool = False

    @property
    def messages(self) -> int:
        """Number of messages per ps and direction: one for each array."""
        return 2 if self.is_sparse else 1


@dataclass(frozen=True)
class Shape:
    """The numbers of tasks, and whether workers wait for each other.

    `backups`   number of workers that a synchronous step does not wait for
    """

    workers: int
    ps: int
    is_synchronous: bool = True
    backups: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.backups < self.workers:
            raise ValueError(f"{self.backups} of {self.workers} workers are backups; at least one has to be waited for")


NULL = Computing(0.0)


class ClusterModel:
    """One simulated cluster. The same seed gives the same times."""

    def __init__(self, hardware: Hardware, shape: Shape, computing: Computing = NULL, seed: int = 0) -> None:
        self._hardware = hardware
        self._shape = shape
        self._computing = computing
        self._random = np.random.default_rng(seed)

    def synchronous(self, step: Step, steps: int) -> Times:
        """Return the times of steps, float64[steps] in s; a step ends when enough workers' updates are applied."""
        return np.array([self._synchronous_step(step) for _ in range(steps)])

    def asynchronous(self, step: Step, steps: int) -> Times:
        """Return the times of each worker's steps, float64[steps, workers] in s; no worker waits for another.

        Transfers are served in the order of their beginning, each with all ps tasks at the same time.
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
            # The overlapped rest of the update continues in the next step, whose fetch queues behind it.
            ended_s = applied_s - self._computing.hidden * (applied_s - at_s)
            times[done[worker], worker] = ended_s - begun[worker]
            done[worker] += 1
            begun[worker] = ended_s
            if done[worker] < steps:
                heapq.heappush(events, (ended_s, worker, True))
        return times

    def _transferred(self, at_s: float, size_bytes: float, step: Step, free_s: Times) -> float:
        """Return when a worker's transfer with all ps tasks ends.

        free_s  float64[ps]: the time at which each ps becomes free; updated here
        """
        hardware = self._hardware
        each_s = size_bytes / self._shape.ps / hardware.link_bytes_per_s
        begins = np.maximum(at_s + self._hops(free_s.shape), free_s)
        np.copyto(free_s, begins + max(each_s, step.messages * hardware.message_s))
        # The whole transfer also passes the worker's own network card.
        return float(max(free_s.max(), begins.min() + each_s * self._shape.ps) + self._hops((1,))[0])

    def _synchronous_step(self, step: Step) -> float:
        updated = self._updated(self._hops((self._shape.workers,)), step)
        told = served((updated + self._hops(updated.shape))[None], self._hardware.message_s)[0]
        wanted = self._shape.workers - self._shape.backups
        return float(np.partition(told, wanted - 1)[wanted - 1] + self._hops((1,))[0])

    def _updated(self, starts: Times, step: Step) -> Times:
        """Return when each worker knows that all ps tasks have applied its update, for steps begun at `starts`."""
        fetched = self._fetched(starts, step)
        hidden_s = self._computing.hidden * (fetched - starts)
        return self._sent(fetched - hidden_s + self._computed(starts.shape), step)

    def _fetched(self, starts: Times, step: Step) -> Times:
        """Return when each worker has fetched from all ps tasks."""
        hardware, shape = self._hardware, (self._shape.ps, self._shape.workers)
        asked = served(starts + self._hops(shape), step.messages * hardware.message_s)
        each_s = step.fetch_bytes / shape[0] / hardware.link_bytes_per_s
        arrived, waited_s = self._carried(asked, each_s)
        fetched: Times = arrived.max(axis=0)
        if hardware.incast_s and each_s:
            fetched = fetched + hardware.incast_s * (waited_s.max(axis=0) > hardware.incast_senders * each_s)
        return fetched + (hardware.sparse_s if step.is_sparse else 0.0)

    def _sent(self, computed: Times, step: Step) -> Times:
        """Return when each worker knows that all ps tasks have applied the update that it sent at `computed`."""
        hardware, shape = self._hardware, (self._shape.ps, self._shape.workers)
        each_s = step.update_bytes / shape[0] / hardware.link_bytes_per_s
        left = np.broadcast_to(computed[:, None], shape[::-1])
        arrived, _ = self._carried(left, each_s)
        applied = served(np.ascontiguousarray(arrived.T), step.messages * hardware.message_s)
        done: Times = (applied + self._hops(shape)).max(axis=0)
        return done - self._computing.hidden * np.maximum(0.0, done - computed)

    def _carried(self, ready: Times, each_s: float) -> tuple[Times, Times]:
        """Return when messages have arrived, and how long each waited for the receiver's network card.

        `ready`, the time at which each can be sent, and the results are float64[senders, receivers] in s. A message
        enters the receiver while it still leaves the sender.
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


def served(arrivals: Times, service_s: float) -> Times:
    """Return the time at which each piece of work is done, in the shape and order of `arrivals`.

    arrivals   float64[servers, pieces] in s, in any order; a server takes one piece at a time, first come first served
    service_s  time for one piece
    """
    order = np.argsort(arrivals, axis=1, kind="stable")
    waiting = np.take_along_axis(arrivals, order, axis=1)
    before = np.arange(arrivals.shape[1]) * service_s
    done = np.maximum.accumulate(waiting - before, axis=1) + before + service_s
    result = np.empty_like(arrivals)
    np.put_along_axis(result, order, done, axis=1)
    return result
