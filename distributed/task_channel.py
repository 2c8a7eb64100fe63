"""Send and Recv between tasks: the `Channel` of a task's executor.

Why: the executor knows edges and tasks; this file knows that a value for another task is a `Tensor` to its server,
and that a value from one arrives on some reader thread. Invariants: the rendezvous is touched under one lock, and
what it commands is carried out after the lock is let go, so that a waiter may call back; every wait has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax

from dflow.distributed.codec import decode_array, encode_array
from dflow.distributed.deadlines import Deadlines, EndOfWaits, MakeDeadlines
from dflow.distributed.messages import EdgeTraffic, Tensor
from dflow.distributed.peers import Peers
from dflow.distributed.rendezvous import EndWait, Rendezvous, RendezvousStatistics, describe
from dflow.lowering.channel import Deliver, Sent, StepId, edge_alone
from dflow.lowering.recorder import RECEIVED, SENT, WAIT_EXPIRED, Recorder
from dflow.tracing.errors import DeadlineExceeded, DflowError, WireError
from dflow.tracing.task_name import short_task_name

LOGGER = logging.getLogger("dflow")

#: A value of no more than this stays a NumPy array: a program takes it in less time than it takes to make a JAX array.
SMALL_BYTES = 1 << 14
#: The kinds of dtypes that are NumPy's own.
NUMPY_KINDS = "biufc"

_Wait = tuple[StepId, str]


@dataclass
class _Total:
    values: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, eq=False)
class _Receiver:
    """A waiter of the rendezvous, with what an error about it has to say."""

    wait: _Wait
    source: str
    deliver: Deliver


class TaskChannel:
    """The channel of the task `name`; see `lowering.channel.Channel`. Any method may be called from any thread."""

    def __init__(
        self,
        name: str,
        peers: Peers,
        *,
        wait_timeout_s: float,
        deadlines: MakeDeadlines = Deadlines,
        recorder: Recorder | None = None,
        on_stall: Callable[[str], str] = lambda why: "",
        described: Callable[[str], str] = short_task_name,
    ) -> None:
        self._name = name
        self._recorder = recorder or Recorder()
        self._on_stall = on_stall
        self._peers = peers
        self._described = described
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous[_Receiver, Sent] = Rendezvous()
        self._receivers: dict[_Wait, _Receiver] = {}
        self._deadlines: EndOfWaits[_Wait] = deadlines(wait_timeout_s, self._expire)
        self._traffic: dict[tuple[str, str], _Total] = {}
        self._taken_in: dict[str, _Total] = {}

    def send(self, step: StepId, edge: str, destination: str, value: Sent) -> None:
        """Hand `value` over for `destination`, waiting until it is computed and the connection has taken it.

        raises  TaskLost if the destination is not in the cluster; what connecting and sending raise
        """
        if destination == self._name:
            self._put(step, edge, value)
            return
        payload = encode_array(value)
        message = Tensor(step.origin, step.number, edge, value.dtype.name, tuple(value.shape))
        peer = self._peers.get(destination)
        began = self._recorder.clock()
        peer.notify(message, payload)
        self._recorder.note(SENT, step, edge, destination, len(payload), began)
        with self._lock:
            total = self._traffic.setdefault((edge_alone(edge), destination), _Total())
            total.values += 1
            total.size_bytes += len(payload)

    def receive(self, step: StepId, edge: str, source: str, deliver: Deliver) -> None:
        """Call `deliver` once, with the value, or with the error that ended the wait."""
        receiver = _Receiver((step, edge), source, deliver)
        with self._lock:
            commands = self._rendezvous.take(step, edge, source, receiver)
            if not commands:
                self._receivers[receiver.wait] = receiver
                self._deadlines.add(receiver.wait)
        self._carry_out(commands)

    def arrived(self, tensor: Tensor, payload: memoryview, source: str) -> None:
        """A value came from the task `source`; raises WireError if it is malformed."""
        step = StepId(tensor.origin, tensor.step)
        self._recorder.note(RECEIVED, step, tensor.edge, source, len(payload))
        value: Sent
        try:
            value = decode_array(tensor.dtype, tensor.shape, payload)
        except WireError as error:
            raise WireError(f"the value of edge {tensor.edge!r} in {describe(step)} is malformed: {error}") from error
        if value.nbytes > SMALL_BYTES or value.dtype.kind not in NUMPY_KINDS:
            value = jax.device_put(value, may_alias=True)
        with self._lock:
            total = self._taken_in.setdefault(source, _Total())
            total.values += 1
            total.size_bytes += len(payload)
            commands = self._rendezvous.put(step, tensor.edge, value)
        self._carry_out(commands)

    def begin(self, step: StepId) -> None:
        """See `Rendezvous.begin`."""
        with self._lock:
            self._rendezvous.begin(step)

    def count_from(self, number: int) -> None:
        """See `Rendezvous.count_from`, of this task's own steps."""
        with self._lock:
            self._rendezvous.count_from(self._name, number)

    def finish(self, step: StepId) -> None:
        """This task's part of the step has ended."""
        with self._lock:
            commands = self._rendezvous.finish(step)
        self._carry_out(commands)

    def abort(self, step: StepId, error: BaseException) -> None:
        """The step is given up; its waits end with `error`."""
        with self._lock:
            commands = self._rendezvous.abort(step, error)
        self._carry_out(commands)

    def connection_lost(self, task: str, error: DflowError) -> None:
        """Values that `task` sent may be lost; waits for them end with `error`."""
        with self._lock:
            commands = self._rendezvous.stop_waiting_for(task, error)
        self._carry_out(commands)

    def task_left(self, task: str, error: DflowError) -> tuple[StepId, ...]:
        """Waits for values of `task` end with `error`, as do the steps it started, which are returned."""
        with self._lock:
            steps = self._rendezvous.open_steps(task)
            commands = self._rendezvous.lose(task, error)
        self._carry_out(commands)
        return steps

    def task_joined(self, task: str) -> None:
        """A task of this name is in the cluster."""
        with self._lock:
            self._rendezvous.welcome(task)

    def oldest_wait(self) -> str:
        """What is waited for longest, in words; empty when nothing is."""
        with self._lock:
            receiver = next(iter(self._receivers.values()), None)
        if receiver is None:
            return ""
        step, edge = receiver.wait
        return f"waits for {short_task_name(receiver.source)} to send the value {edge!r} in {describe(step)}"

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """What was sent to other tasks so far, per edge and destination."""
        with self._lock:
            return tuple(
                EdgeTraffic(edge, self._name, destination, total.values, total.size_bytes)
                for (edge, destination), total in self._traffic.items()
            )

    def taken_in(self) -> dict[str, int]:
        """How many bytes of values came from each other task."""
        with self._lock:
            return {task: total.size_bytes for task, total in self._taken_in.items()}

    def statistics(self) -> RendezvousStatistics:
        """What the rendezvous holds, and has done."""
        with self._lock:
            return self._rendezvous.statistics()

    def close(self) -> None:
        """Let no wait expire any more."""
        self._deadlines.close()

    def _put(self, step: StepId, edge: str, value: Sent) -> None:
        with self._lock:
            commands = self._rendezvous.put(step, edge, value)
        self._carry_out(commands)

    def _expire(self, wait: _Wait) -> None:
        step, edge = wait
        with self._lock:
            receiver = self._receivers.get(wait)
        if receiver is None:
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

    def _carry_out(self, commands: Iterable[EndWait[_Receiver, Sent]]) -> None:
        for command in commands:
            self._forget(command.waiter)
            try:
                command.waiter.deliver(command.outcome)
            except Exception:
                LOGGER.exception("%s: a receiver of edge %r failed", self._name, command.waiter.wait[1])

    def _forget(self, receiver: _Receiver) -> None:
        with self._lock:
            if self._receivers.get(receiver.wait) is receiver:
                del self._receivers[receiver.wait]
                self._deadlines.discard(receiver.wait)
