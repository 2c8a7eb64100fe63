"""The schedule's program on a shared queue: each worker enqueues and dequeues elements, which are numbers.

A simulated task holds the queue by the real task server's code, which keeps its pending operations and deadlines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow.distributed.wire.codec import decode_arrays, encode_arrays
from dflow.distributed.wire.messages.plans import CancelStep
from dflow.distributed.wire.messages.resources import CallResource, CreateResource
from dflow.lowering.queues.pending_operations import HeldResource, Results
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, DflowError, QueueClosed
from dflow.tracing.ir import ops
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from tests.simulation.checks import Require, name_of
from tests.simulation.tasks import Member, SimulatedTasks

NAME = "shared"
CAPACITY = 2
#: Deadlines of an op at the queue, and of its worker for the answer.
OP_S = 3.0
ANSWER_S = 7.0
PAUSE_S = 0.2


@dataclass
class _Put:
    """An enqueued element. `is_in` is the outcome that its worker received; None if unknown."""

    number: int
    worker: str
    queue: str = ""
    is_in: bool | None = None
    #: The number of the take that returned it.
    taken: int | None = None


@dataclass
class _Take:
    """A dequeue of `count` elements. `is_answered` is set when its worker gets the outcome."""

    number: int
    worker: str
    queue: str = ""
    count: int = 1
    is_answered: bool = False


class QueueChecks:
    """The invariants of queues; `require` records a violation. A task that restarts holds another queue.

    - `taken once`  at most one take returns an element, and from the queue that the element was put into;
    - `none lost`   an element in the queue was taken, or is there at the end. Exempt are as many elements as unanswered
                    takes may have returned, whose workers died, stopped waiting or were cut off;
    - `refused`     an element whose worker was notified that the put failed is never taken;
    - `in order`    a worker takes the elements of each other worker in the order of their puts.
    """

    def __init__(self, require: Require) -> None:
        self._require = require
        self._puts: list[_Put] = []
        self._takes: list[_Take] = []
        self._newest: dict[tuple[str, str, str], tuple[int, int]] = {}

    def puts(self, worker: str) -> _Put:
        """A worker is about to put an element."""
        self._puts.append(_Put(len(self._puts), worker))
        return self._puts[-1]

    def takes(self, worker: str, count: int) -> _Take:
        """A worker is about to take `count` elements."""
        self._takes.append(_Take(len(self._takes), worker, count=count))
        return self._takes[-1]

    def taken(self, take: _Take, numbers: Iterable[int]) -> None:
        """A worker receives the elements that it took."""
        take.is_answered = True
        for number in numbers:
            put = self._puts[number]
            text = f"element {number} of {put.worker} comes out for {take.worker}"
            self._require(put.taken is None, "taken once", f"{text}, and came out before")
            self._require(put.queue == take.queue, "taken once", f"{text} of {take.queue}; it went into {put.queue}")
            self._require(put.is_in is not False, "refused", f"{text}, and {put.worker} was told that it is not in")
            put.taken = take.number
            key = (take.queue, take.worker, put.worker)
            before = self._newest.get(key, (-1, -1))
            is_later = before[0] > take.number or before[1] < number
            self._require(is_later, "in order", f"{text} after element {before[1]}")
            self._newest[key] = max(before, (take.number, number))

    def end(self, queue: str, held: Sequence[int]) -> None:
        """Check the final state: no event is pending, and `queue`, of the task's last life, holds `held`."""
        for number in held:
            put = self._puts[number]
            text = f"element {number} of {put.worker} is in the queue at the end"
            self._require(held.count(number) == 1 and put.taken is None, "taken once", f"{text}, and somewhere else")
            self._require(put.is_in is not False, "refused", f"{text}, and {put.worker} was told that it is not")
        missing = [
            put.number
            for put in self._puts
            if put.queue == queue and put.is_in and put.taken is None and put.number not in held
        ]
        unknown = sum(take.count for take in self._takes if take.queue == queue and not take.is_answered)
        text = f"elements {missing} went into {queue} and did not come out; {unknown} may have, unseen"
        self._require(len(missing) <= unknown, "none lost", text)


def contents(queue: HeldResource) -> list[int]:
    """Empty a queue and return its numbers, including those of pending puts."""
    found: list[int] = []

    def taken(results: Outcome[Results]) -> None:
        if not isinstance(results, BaseException):
            numbers, count = results
            found.extend(np.asarray(numbers)[: int(count)].tolist())

    queue.start(ResourceOp(ops.queue_close.name), (), lambda results: None)
    queue.start(ResourceOp(ops.queue_dequeue_up_to.name, count=4 * CAPACITY, timeout_s=0.0), (), taken)
    return found


class QueueWorker:
    """A worker that puts and takes at random, `ops` times in all. The worker `:0` may then close the queue."""

    def __init__(
        self, member: Member, tasks: SimulatedTasks, checks: QueueChecks, host: str, ops: int, seed: str
    ) -> None:
        self.is_complete = False
        self._member, self._tasks, self._checks, self._host, self._ops = member, tasks, checks, host, ops
        self._random = random.Random(f"queue {seed} {member.process}")
        #: The number of the host's life that holds the queue; -1 before it is created.
        self._life = -1
        self._closes = member.process.host.endswith(":0") and self._random.random() < 0.5

    def run(self) -> None:
        """Create or find the queue, and use it."""
        for _ in range(self._ops):
            try:
                self._create()
                self._member.sleep(PAUSE_S * self._random.random())
                self._put() if self._random.random() < 0.6 else self._take()
            except QueueClosed as error:
                self._member.say(f"finds the queue closed: {error}")
                break
            except DflowError as error:
                self._member.failed(error)
        if self._closes:
            self._close()
        self.is_complete = True

    def _create(self) -> None:
        life = self._tasks.life_of(self._host)
        if life != self._life:
            message = CreateResource(NAME, "queue<i32[]>", QueueSettings(QueueKind.FIFO, CAPACITY))
            self._member.ask(self._host, message, timeout_s=ANSWER_S)
            self._life = life

    def _put(self) -> None:
        put = self._checks.puts(str(self._member.process))
        self._member.say(f"puts in element {put.number}")

        def told(reply: Any) -> None:
            if not isinstance(reply, BaseException):
                put.is_in = True
            elif isinstance(reply, DeadlineExceeded | QueueClosed):
                put.is_in = False

        self._op(ops.queue_enqueue, put, [np.asarray(put.number, np.int32)], told)

    def _take(self) -> None:
        count = 1 + (self._random.random() < 0.3)
        take = self._checks.takes(str(self._member.process), count)
        self._member.say(f"takes {count}")

        def told(reply: Any) -> None:
            if not isinstance(reply, BaseException):
                (numbers,) = decode_arrays(reply.message.arrays, reply.payload)
                self._member.say(f"took {numbers.tolist()}")
                self._checks.taken(take, np.ravel(numbers).tolist())
            elif isinstance(reply, DeadlineExceeded | QueueClosed):
                take.is_answered = True

        op = ops.queue_dequeue if count == 1 else ops.queue_dequeue_many
        self._op(op, take, [], told, count if count > 1 else 0)

    def _close(self) -> None:
        cancels, step = self._random.random() < 0.5, next(self._member.numbers)
        message = CallResource(NAME, ResourceOp(ops.queue_close.name, cancel_pending=cancels), self._member.name, step)
        try:
            self._member.ask(self._host, message, timeout_s=ANSWER_S)
            self._member.say("closes the queue")
        except DflowError as error:
            self._member.say(f"could not close the queue: {error}")

    def _op(
        self, op: OpDef, seen: _Put | _Take, operands: Sequence[Any], told: Callable[[Any], None], count: int = 0
    ) -> None:
        """Do an op. If it fails here, as by its deadline, cancel it at the queue too, as `Cluster` does."""
        infos, payload = encode_arrays(operands)
        step = next(self._member.numbers)
        message = CallResource(NAME, ResourceOp(op.name, count, OP_S), self._member.name, step, infos)
        peer = self._member.server.peer(name_of(self._host))
        seen.queue = self._tasks.connections.far(peer)
        try:
            self._member.ask(self._host, message, payload, on_reply=told, timeout_s=ANSWER_S)
        except DflowError as error:
            if not peer.closed:
                peer.notify(CancelStep(self._member.name, step, str(error)))
            raise
