"""Registration of a plan with another task, which compiles its programs while this process does other work.

A plan is first sent with only the fingerprints of its programs, since another worker, or an earlier trace, has usually
sent the same programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec

from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.plans import Registered, RegisterPlan
from dflow.lowering.programs.discharge import Discharged
from dflow.lowering.steps.lowered import Lowered
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, WireError

_ENCODER = msgspec.msgpack.Encoder()


def start_registration(peer: Peer, lowered: Lowered, export: Callable[[Discharged], bytes]) -> Callable[[float], int]:
    """Send a plan to a task; return a function that waits for its handle, given the longest wait in s.

    export   returns the bytes of an exported program
    raises   TransportClosed when the connection has ended; the function raises this, the task's error, and
             DeadlineExceeded
    """
    blobs = [*map(export, lowered.functions)]
    names = tuple(hashlib.sha256(blob).digest() for blob in blobs)
    plan = _ENCODER.encode(lowered.plan)
    answer: Future[int] = Future()
    #: Indices of the programs that the task lacked in an answer; it may have dropped another one before the next.
    lacking: set[int] = set()

    def asked(reply: Outcome[Reply[Registered]]) -> None:
        """Send the programs that the task lacks; else pass on its handle or error. Runs on a reader thread."""
        if answer.done():  # a failed start may call back as well
            return
        if isinstance(reply, BaseException):
            answer.set_exception(reply)
        elif not (missing := reply.message.missing):
            answer.set_result(reply.message.handle)
        elif not (new := {*missing}.intersection(range(len(blobs))) - lacking):
            answer.set_exception(WireError(f"{peer.name} lacks programs {[*missing]}, which were sent to it"))
        else:
            lacking.update(new)
            send()

    def send() -> None:
        sent = [blob if position in lacking else b"" for position, blob in enumerate(blobs)]
        try:
            peer.start(RegisterPlan(plan, tuple(map(len, sent)), names), b"".join(sent), on_reply=asked)
        except Exception as error:
            asked(error)

    def handle(timeout_s: float) -> int:
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError:
            task = short_task_name(peer.name)
            raise DeadlineExceeded(f"{task} did not register a plan within {timeout_s:g} s") from None

    peer.start(RegisterPlan(plan, (0,) * len(blobs), names), on_reply=asked)
    return handle
