"""Registration of a plan with another task, which compiles its programs while this process does other work.

A plan is first sent with only the fingerprints of its programs, since another worker, or an earlier trace, has usually
sent the same programs.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec

from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.plans import Registered, RegisterPlan, Wanted
from dflow.lowering.programs.shared_exports import SharedExports
from dflow.lowering.steps.lowered import Lowered
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, WireError

_ENCODER = msgspec.msgpack.Encoder()


class PlanRegistration:
    """The registration of a plan with a task, in progress; `exports` are shared with other tasks.

    Raises TransportClosed when the connection has ended.
    """

    def __init__(self, peer: Peer, lowered: Lowered, exports: SharedExports) -> None:
        self._peer = peer
        self._blobs = [exports.blob(pure) for pure in lowered.functions]
        self._names = tuple(hashlib.sha256(blob).digest() for blob in self._blobs)
        self._plan = _ENCODER.encode(lowered.plan)
        self._answer: Future[Registered] = Future()
        peer.start(RegisterPlan(self._plan, (0,) * len(self._blobs), self._names), on_reply=self._asked)

    def handle(self, timeout_s: float) -> int:
        """Wait for the plan's handle; raises the task's error, DeadlineExceeded, TransportClosed."""
        task = short_task_name(self._peer.name)
        try:
            return self._answer.result(timeout_s).handle
        except FutureTimeoutError:
            raise DeadlineExceeded(f"{task} did not register a plan within {timeout_s:g} s") from None

    def _asked(self, reply: Outcome[Reply[Registered | Wanted]]) -> None:
        """Send the programs that the task lacks. Runs on a reader thread."""
        if isinstance(reply, BaseException) or not isinstance(reply.message, Wanted):
            self._registered(reply)
            return
        wanted = reply.message.programs
        sent = [blob if place in wanted else b"" for place, blob in enumerate(self._blobs)]
        message = RegisterPlan(self._plan, tuple(map(len, sent)), self._names)
        try:
            self._peer.start(message, b"".join(sent), on_reply=self._registered)
        except Exception as error:
            self._registered(error)

    def _registered(self, reply: Outcome[Reply[Registered | Wanted]]) -> None:
        if self._answer.done():  # a failed start may call back as well
            return
        if isinstance(reply, BaseException):
            self._answer.set_exception(reply)
        elif isinstance(reply.message, Wanted):
            missing = list(reply.message.programs)
            self._answer.set_exception(WireError(f"{self._peer.name} lacks programs {missing}, which were sent to it"))
        else:
            self._answer.set_result(reply.message)
