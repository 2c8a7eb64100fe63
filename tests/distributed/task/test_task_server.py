"""A task's answers to its peers, in memory and over sockets."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflow.distributed.synchronous.round_messages import LeaveRounds, NextRound, ProposeRounds
from dflow.distributed.task import row_reads
from dflow.distributed.task.arrivals import Arrival
from dflow.distributed.task.request_queues import MOST_OF_A_TASK
from dflow.distributed.task.row_read_messages import ReadRows, RowRead
from dflow.distributed.wire.codec import encode_array
from dflow.distributed.wire.messages.basic import ArrayInfo, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.observing import GetClock, GetTaskState, TaskState
from dflow.distributed.wire.messages.plans import CancelStep, RegisterPlan, RunPlan
from dflow.distributed.wire.messages.resources import CallResource, CreateResource
from dflow.distributed.wire.messages.status import GetStatus
from dflow.distributed.wire.messages.variables import ForgetState, ReadVariables, WriteVariable
from dflow.tracing import errors
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.rows.id_rows import IdRows
from tests.distributed.task.served_tasks import CLIENT, ONES, WORKER, Cluster, create, creation, read, roster
from tests.distributed.transports import DEADLINE_S, Recorder, reach


def row_read(name: str, bucket: int) -> ReadRows:
    """A read of a row by an id of the variable "w", whose ids would be in `name`."""
    rows = IdRows((0, 1, bucket, 0), buckets=1, first=0, ids=name, born=name, seen=name, ledger=name)
    return ReadRows((RowRead("w", "f32[3]", rows),), (ArrayInfo("uint32", (1, 2)),))


REFUSED: list[tuple[Message, Callable[[], bytes], type[Exception], str]] = [
    (ReadVariables(("v",)), bytes, errors.VariableError, "no variable 'v'"),
    (WriteVariable("v", "float32", (1,)), lambda: bytes(4), errors.VariableError, "no variable 'v'"),
    (WriteVariable("w", "float32", (2,)), lambda: bytes(8), errors.VariableShapeError, r"holds f32\[3\]"),
    (WriteVariable("w", "float32", (3,)), lambda: bytes(8), errors.WireError, "takes 12 bytes but the payload has 8"),
    (creation(ONES, "v"), lambda: bytes(11), errors.WireError, "do not fill a payload of 11 bytes"),
    (
        RunPlan(0, CLIENT, 1),
        bytes,
        errors.TaskLost,
        "ps:0 was asked for plan 0, which is none of its 0: it has been started again since",
    ),
    (row_read("w", 1 << 31), lambda: bytes(8), errors.WireError, "expected at least 1 bucket, of 1 to 2 ids"),
    (row_read("w", 2), lambda: bytes(8), errors.WireError, r"beside 3 rows: expected \(3, 2\), got \(3,\)"),
    (row_read("x", 2), lambda: bytes(8), errors.TaskLost, "ps:0 does not hold 'x' now"),
    (GetStatus(), bytes, errors.RemoteError, "a task does not answer GetStatus"),
]


@pytest.mark.parametrize(("message", "payload", "kind", "text"), REFUSED, ids=lambda case: getattr(case, "name", None))
def test_a_request_that_fails_says_why_and_the_task_goes_on(
    cluster: Cluster, message: Message, payload: Callable[[], bytes], kind: type[Exception], text: str
) -> None:
    create(cluster)
    with pytest.raises(kind, match=text):
        cluster.ask(message, payload())
    assert read(cluster) == [1, 1, 1]


def test_a_read_of_too_many_rows_is_refused_before_they_are_read(cluster: Cluster, monkeypatch: Any) -> None:
    create(cluster)
    message = ReadRows((RowRead("w", "f32[3]"),), (ArrayInfo("uint8", (100,)),))
    cluster.ask(message, bytes(100))
    monkeypatch.setattr(row_reads, "MOST_BYTES", 399)
    with pytest.raises(errors.WireError, match="expected at most 399 bytes, got 400"):
        cluster.ask(message, bytes(100))


@pytest.mark.parametrize(
    ("message", "text"),
    [(GetClock(), "GetClock is a request; use `call`"), (Ok(), "a task does not take Ok")],
    ids=["request", "answer"],
)
def test_a_notification_that_a_task_does_not_take_says_so(cluster: Cluster, message: Message, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        cluster.ps._handle(cluster.ps._notices, message, Arrival(cluster.client, memoryview(b"")))


@pytest.mark.parametrize(
    "message",
    [
        RunPlan(0, WORKER, 1),
        CancelStep(WORKER, 1, "meant ill"),
        CallResource("q", ResourceOp("queue.size"), WORKER, 1),
        ProposeRounds("run", WORKER, 2, 2, "sums"),
        NextRound("run", WORKER, 0, "sums", 1.0),
        LeaveRounds("run", WORKER, 0, "sums"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_task_speaks_for_another(cluster: Cluster, message: Message) -> None:
    with pytest.raises(errors.SecurityError, match=f"{CLIENT} may not speak for {WORKER}"):
        cluster.ask(message)


def test_a_resource_that_an_earlier_process_shall_hold_is_not_created_here(cluster: Cluster) -> None:
    message = CreateResource(
        "v", "accumulator<f32[3]>", AccumulatorSettings(Reduction.MEAN, 2), process="an earlier one"
    )
    with pytest.raises(errors.TaskLost, match="'v' is placed on an earlier process of ps:0, which has been started"):
        cluster.ask(message, bytes(4))
    with pytest.raises(errors.VariableError, match="no variable 'v'"):
        cluster.ask(ReadVariables(("v",)))


@pytest.mark.parametrize(
    "message",
    [
        creation(np.ones(3, np.float32), "v"),
        ReadVariables(("w",)),
        WriteVariable("w", "float32", (3,)),
        ForgetState("w", True, "its program ended", "make it again"),
        RegisterPlan(b"", ()),
        ProposeRounds("run", CLIENT, 1, 1, "gradients"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_process_that_never_joined_is_refused(cluster: Cluster, message: Message) -> None:
    create(cluster)
    stranger = reach(cluster.transport, cluster.ps.address, Recorder(), name=CLIENT)
    expected = "ps:0 serves only members of its cluster: chief:0 has not joined it; join by dflow.connect()"
    with pytest.raises(errors.TaskLost, match=re.escape(expected)):
        stranger.call(message, encode_array(5 * ONES), timeout_s=DEADLINE_S)
    assert read(cluster) == [1, 1, 1]
    assert isinstance(stranger.call(GetTaskState(), timeout_s=DEADLINE_S).message, TaskState)


def test_a_worker_that_was_given_up_writes_nothing_more(cluster: Cluster) -> None:
    create(cluster)
    write = WriteVariable("w", "float32", (3,)), encode_array(5 * ONES)
    zombie = cluster.reach_ps(WORKER)
    assert zombie.call(*write, timeout_s=DEADLINE_S).message == Ok()
    cluster.ps.roster_changed(roster(cluster.ps, cluster.other, left={WORKER: "no heartbeat for 10 s"}))
    for peer in (zombie, cluster.reach_ps(WORKER)):
        expected = r"ps:0 serves only members of its cluster: worker:0 left at 1\.0 s: no heartbeat for 10 s"
        with pytest.raises(errors.TaskLost, match=expected):
            peer.call(WriteVariable("w", "float32", (3,)), encode_array(7 * ONES), timeout_s=DEADLINE_S)
    assert read(cluster) == [5, 5, 5]


def test_queued_requests_of_a_worker_that_has_left_are_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(cluster)
    zombie, began, may_end = cluster.reach_ps(WORKER), threading.Semaphore(0), threading.Event()

    def views(keys: object) -> list[Any]:
        began.release()
        assert may_end.wait(DEADLINE_S)
        return [ONES]

    with monkeypatch.context() as patch:
        patch.setattr(cluster.ps.store, "views", views)
        reads = [zombie.start(ReadVariables(("w",))) for _ in range(MOST_OF_A_TASK)]
        write = zombie.start(WriteVariable("w", "float32", (3,)), encode_array(7 * ONES))
        for _ in reads:
            assert began.acquire(timeout=DEADLINE_S)
        zombie.call(GetTaskState(), timeout_s=DEADLINE_S)  # so the write has come
        cluster.ps.roster_changed(roster(cluster.ps, cluster.other, left={WORKER: "no heartbeat"}))
        may_end.set()
        with pytest.raises(errors.TaskLost, match=r"ps:0 serves only members .* worker:0 left at 1\.0 s: no heartbeat"):
            write.wait(DEADLINE_S)
    assert read(cluster) == [1, 1, 1]
