"""The coordinator's load in a large cluster: its real state machine, fed with the messages of many simulated tasks.

The processor time of `CoordinatorState.handle` and of the codec is measured on this machine. The tasks' messages and
their times are simulated. Sockets are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from dflow.distributed.coordinator.coordinator import FEW
from dflow.distributed.coordinator.coordinator_events import Asked, Broadcast, Command, SendReply, Started, Ticked, Told
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.training.work_messages import ClaimSteps
from dflow.distributed.wire.codec import decode_message, encode_message
from dflow.distributed.wire.large_message import RosterPacker, pack
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Roster
from dflow.tracing.devices.task_name import task_name

HEARTBEAT_S = 1.0
TICK_S = 0.5


@dataclass(frozen=True)
class Load:
    """The coordinator's work in a second, or for one event.

    `messages`     number of messages received and sent
    `size_bytes`   their total size, without frames
    `processor_s`  processor time measured on one core
    """

    messages: float
    size_bytes: float
    processor_s: float


@dataclass(frozen=True)
class CoordinatorLoad:
    """The load of each second with heartbeats and claims (`steady`), and of the join of the last task (`join`)."""

    tasks: int
    steady: Load
    join: Load


def coordinator_load(workers: int, ps: int, step_s: float, claim_steps: int = 16, seconds: int = 3) -> CoordinatorLoad:
    """Measure the load while all tasks of a cluster join, and then train for `seconds`.

    step_s       time of a worker's step
    claim_steps  number of steps that a worker does between two claims
    """
    return _Stream(workers, ps).load(step_s * claim_steps, seconds)


class _Stream:
    def __init__(self, workers: int, ps: int) -> None:
        self._names = [task_name("worker", index) for index in range(workers)]
        self._names += [task_name("ps", index) for index in range(ps)]
        self._workers = workers
        self._state = make_coordinator_state({"worker": workers, "ps": ps})
        self._state.handle(Started(0.0, "simulated"))
        self._rosters = RosterPacker()
        self._asks = 0
        self._messages = self._size_bytes = 0
        self._again_s = 0.0

    def load(self, claim_s: float, seconds: int) -> CoordinatorLoad:
        for peer, name in enumerate(self._names[:-1]):
            self._state.handle(Asked(0.0, peer, self._ask(), _join(name)))
        last = len(self._names) - 1
        self._state.handle(Ticked(0.0))
        join = self._measured(0.0, [(last, True, _join(self._names[last]))])
        numbers = [0] * self._workers
        claims = [peer * claim_s / self._workers for peer in range(self._workers)]
        totals = [Load(0, 0, 0.0)]
        for second in range(seconds):
            sent: list[tuple[int, bool, Message]] = []
            for peer, name in enumerate(self._names):
                sent.append((peer, False, Heartbeat(name)))
                while peer < self._workers and claims[peer] < second + 1:
                    numbers[peer] += 1
                    sent.append((peer, True, _claim(name, numbers[peer])))
                    claims[peer] += claim_s
            totals.append(self._measured(float(second), sent))
        steady = Load(
            sum(load.messages for load in totals) / seconds,
            sum(load.size_bytes for load in totals) / seconds,
            sum(load.processor_s for load in totals) / seconds,
        )
        return CoordinatorLoad(len(self._names), steady, join)

    def _measured(self, at_s: float, sent: Iterable[tuple[int, bool, Message]]) -> Load:
        """Measure decoding and handling `sent`, and encoding the answers; a broadcast is encoded once for each peer."""
        frames = [(peer, is_call, encode_message(message)) for peer, is_call, message in sent]
        self._messages, self._size_bytes, self._again_s = len(frames), sum(len(frame) for _, _, frame in frames), 0.0
        began = time.process_time()
        for peer, is_call, frame in frames:
            message = decode_message(frame)
            self._send(
                self._state.handle(Asked(at_s, peer, self._ask(), message) if is_call else Told(at_s, peer, message))
            )
        for _ in range(round(HEARTBEAT_S / TICK_S)):
            self._send(self._state.handle(Ticked(at_s)))
        return Load(self._messages, self._size_bytes, time.process_time() - began + self._again_s)

    def _send(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case SendReply(_, reply):
                    self._count(1, *(self._rosters.pack(reply) if isinstance(reply, Roster) else pack(reply)))
                case Broadcast(peers, news):
                    self._count(len(peers), *pack(news, goes_to_many=len(peers) > FEW))

    def _count(self, receivers: int, message: Message, payload: bytes) -> None:
        one = time.process_time()
        size_bytes = len(encode_message(message)) + len(payload)
        # The coordinator encodes the message for each receiver; here one encoding is measured and multiplied. All
        # receivers share the payload.
        self._again_s += (time.process_time() - one) * (receivers - 1)
        self._messages += receivers
        self._size_bytes += size_bytes * receivers

    def _ask(self) -> int:
        self._asks += 1
        return self._asks


def _join(name: str) -> Join:
    return Join(name, "10.0.0.1:40000", incarnation="0123456789abcdef")


def _claim(name: str, number: int) -> ClaimSteps:
    done = 16 if number > 1 else 0
    return ClaimSteps("run", name, 1 << 40, number, number - 1, done, 0.1, {"loss": 1.0})
