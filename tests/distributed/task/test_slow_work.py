"""The slow work of one worker at a task delays no other worker: its steps, reads and registrations go on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from dflow.distributed.steps import plan_registry
from dflow.distributed.task import task_checkpoints, variable_creation
from dflow.distributed.task.checkpoint_messages import ReadCheckpoint, SaveVariables
from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.transport.base import Peer, PendingReply, Transport
from dflow.distributed.transport.link import Limits, on_reader_thread
from dflow.distributed.wire.codec import encode_array
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.plans import Registered, RegisterPlan, RunPlan
from dflow.distributed.wire.messages.transfers import Values
from dflow.distributed.wire.messages.variables import CreateVariables, WriteVariable
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.plan import Call, Item, Plan, Read, Recv, Send
from dflow.tracing.errors import DeadlineExceeded, DflowError, TaskLost
from tests.distributed.task.served_tasks import CLIENT, CLIENTS, ONES, PS, Cluster, MakeCluster, create, read
from tests.distributed.transports import DEADLINE_S, KINDS, Kind
from tests.distributed.waiting import until
from tests.lowering.flat_programs import flat_program

#: More than any number of threads.
MANY = 100
#: A task of the roster that does not answer.
DEAD = CLIENTS[-1]


class Steps:
    """Steps of a client at the ps: one changes a variable on the thread that brings a value, one calls Python."""

    def __init__(self, cluster: Cluster, client: str) -> None:
        self.cluster, self.client, self.number = cluster, client, 0
        self.peer = cluster.reach_ps(client)

    def start(self, *items: Item, program: Program | None = None) -> PendingReply[Ok]:
        """Start a step of a plan."""
        handle = self.cluster.ps.plans.add(Plan(PS, 4, items), [] if program is None else [program])
        return self.peer.start(self.next_run(handle))

    def next_run(self, handle: int) -> RunPlan:
        step = self.next_step()
        return RunPlan(handle, step.origin, step.number)

    def next_step(self) -> StepId:
        self.number += 1
        return StepId(self.client, self.number)

    def run_all(self) -> None:
        """Run a step of each kind, read and write."""
        add = flat_program(lambda w, x: [w + x, w + x], 1)
        items = (
            Recv("grad", self.client, (0,), (("f32", (3,)),)),
            Call(0, writes=("w",), reads=(), takes=(0,), gives=(1,), asynchronous=True),
        )
        before = np.asarray(read(self.cluster))
        handle = self.cluster.ps.plans.add(Plan(PS, 4, items), [add])
        for _ in range(2):
            step = self.next_step()
            running = self.peer.start(RunPlan(handle, step.origin, step.number))
            self.peer.notify(Values(step.origin, step.number, "grad"), encode_array(ONES))
            assert running.wait(DEADLINE_S).message == Ok()
        called = threading.Event()
        calling = self.start(Call(0, (), (), (), ()), program=flat_program(lambda: (called.set(), ())[1]))
        assert calling.wait(DEADLINE_S).message == Ok()
        assert called.is_set()
        np.testing.assert_array_equal(read(self.cluster), before + 2)
        written = self.peer.call(WriteVariable("w", "float32", (3,)), encode_array(ONES), timeout_s=DEADLINE_S)
        assert written.message == Ok()


class Compilations:
    """Programs that are compiled until they may end."""

    def __init__(self) -> None:
        self.began: list[bytes] = []
        self.may_end = threading.Semaphore(0)

    def load(self, blob: memoryview, writes: int, reads: int) -> Program:
        self.began.append(bytes(blob))
        assert self.may_end.acquire(timeout=DEADLINE_S)
        return flat_program(lambda: ())

    def until_begun(self, count: int) -> None:
        until(lambda: len(self.began) >= count)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    """At most two at the same time."""
    made = Compilations()
    monkeypatch.setattr(plan_registry, "load_program", made.load)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    yield made
    made.may_end.release(10 * MANY)


def register(peer: Peer, program: bytes) -> PendingReply[Any]:
    plan = msgspec.msgpack.encode(Plan(PS, 0, (Call(0, (), (), (), ()),)))
    return peer.start(RegisterPlan(plan, (len(program),)), program)


def test_a_worker_that_registers_many_plans_keeps_no_other_from_registering_one(
    compilations: Compilations, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster()
    first, second = cluster.reach_ps(CLIENTS[1]), cluster.reach_ps(CLIENTS[2])
    many = [register(first, b"%d" % number) for number in range(MANY)]
    compilations.until_begun(2)
    one = register(second, b"one")
    until(lambda: {CLIENTS[1], CLIENTS[2]} <= {*cluster.ps.plans.compiling._waiting})
    compilations.may_end.release(2)
    compilations.until_begun(4)
    assert b"one" in compilations.began[:4]
    compilations.may_end.release(MANY)
    assert all(isinstance(each.wait(DEADLINE_S).message, Registered) for each in (one, *many))


def test_closing_waits_for_no_compilation(compilations: Compilations, make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    asked = [register(cluster.client, b"%d" % number) for number in range(MANY)]
    compilations.until_begun(2)
    cluster.ps.close()
    for each in asked:
        with pytest.raises(DflowError, match=r"closes|stopped|closed"):
            each.wait(DEADLINE_S)
    compilations.may_end.release(2)
    until(lambda: not any(thread.name.startswith(f"dflow {PS}_") for thread in threading.enumerate()))
    assert len(compilations.began) == 2


#: Requests, each with a function that its handler calls.
SLOW: dict[str, tuple[ModuleType, str, Message]] = {
    "save": (task_checkpoints, "location_of", SaveVariables(CLIENT, 1, "/nowhere", ())),
    "read": (task_checkpoints, "open_arrays", ReadCheckpoint(CLIENT, 1, "/nowhere", "", {})),
    "create": (variable_creation, "_parts", CreateVariables((), ())),
}


@pytest.mark.parametrize("what", SLOW)
def test_a_slow_request_delays_no_step_of_another_worker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    create(cluster)
    began, may_end = threading.Semaphore(0), threading.Event()
    owner, name, message = SLOW[what]

    def wait(*_: Any) -> Any:
        began.release()
        assert may_end.wait(DEADLINE_S)
        raise DflowError("it has ended")

    monkeypatch.setattr(owner, name, wait)
    asked = [cluster.client.start(message) for _ in range(MANY)]
    assert began.acquire(timeout=DEADLINE_S)
    worker = Steps(cluster, CLIENTS[1])
    monkeypatch.setattr(cluster, "client", worker.peer)
    worker.run_all()
    may_end.set()
    for each in asked:
        with pytest.raises(DflowError, match="it has ended"):
            each.wait(DEADLINE_S)


def test_items_that_wait_delay_no_step(cluster: Cluster) -> None:
    """A Python callback of a plan may wait for another step, so that must not wait for it."""
    create(cluster)
    worker, together = Steps(cluster, CLIENT), threading.Barrier(MANY + 1, timeout=DEADLINE_S)
    meeting = flat_program(lambda: (together.wait(), ())[1])
    running = [worker.start(Call(0, (), (), (), ()), program=meeting) for _ in range(MANY)]
    until(lambda: together.n_waiting == MANY)
    Steps(cluster, CLIENTS[1]).run_all()
    together.wait()
    assert [each.wait(DEADLINE_S).message for each in running] == [Ok()] * MANY


def test_the_first_run_of_a_plan_delays_nothing_else(cluster: Cluster) -> None:
    """JAX may compile the program again then, for where its operands lie."""
    create(cluster)
    worker, compiled = Steps(cluster, CLIENT), threading.Event()
    program = flat_program(lambda: (compiled.wait(DEADLINE_S), ())[1])
    running = worker.start(Call(0, (), (), (), (), asynchronous=True), program=program)
    worker.run_all()
    Steps(cluster, CLIENTS[1]).run_all()
    compiled.set()
    assert running.wait(DEADLINE_S).message == Ok()


# Dead tasks.


class WithDeadHost:
    """A transport with a dead host: attempts to connect it fail, once they may end."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.listen: Callable[..., Any] = transport.listen
        self.attempts: list[bool] = []
        self.began, self.may_end = threading.Event(), threading.Event()

    def connect(self, address: str, **settings: Any) -> Peer:
        if address != "nowhere":
            return self._transport.connect(address, **settings)
        self.attempts.append(on_reader_thread())
        self.began.set()
        assert self.may_end.wait(DEADLINE_S)
        raise DeadlineExceeded("no answer")


@pytest.fixture(params=sorted(KINDS))
def with_dead(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, WithDeadHost]]:
    kind: Kind = KINDS[request.param]
    made: list[WithDeadHost] = []

    def make(limits: Limits | None) -> Transport:
        made.append(WithDeadHost(kind.make(limits)))
        return made[-1]

    cluster = Cluster(Kind(make, kind.free, kind.nobody), TaskSettings())
    yield cluster, made[0]
    made[0].may_end.set()
    cluster.close()


def send_to_dead(server: TaskServer) -> int:
    return server.plans.add(Plan(PS, 1, (Read(("w",), (0,)), Send("value", DEAD, (0,)))), ())


def test_dialling_a_dead_task_delays_nothing_else(with_dead: tuple[Cluster, WithDeadHost]) -> None:
    """Not even what comes over the connection that asked for it; all steps share the attempt."""
    cluster, dead = with_dead
    create(cluster)
    worker, handle = Steps(cluster, CLIENT), send_to_dead(cluster.ps)
    sending = [worker.peer.start(worker.next_run(handle)) for _ in range(MANY)]
    worker.run_all()
    Steps(cluster, CLIENTS[1]).run_all()
    assert dead.began.wait(DEADLINE_S)
    dead.may_end.set()
    for each in sending:
        with pytest.raises(TaskLost, match="no answer"):
            each.wait(DEADLINE_S)
    assert dead.attempts == [False]


def test_a_step_that_waits_for_a_dead_task_can_be_cancelled(with_dead: tuple[Cluster, WithDeadHost]) -> None:
    cluster, dead = with_dead
    create(cluster)
    step, outcomes = StepId(PS, 1), list[Any]()
    cluster.ps.runs.run(cluster.ps.plans.get(send_to_dead(cluster.ps)), step, (), outcomes.append)
    assert dead.began.wait(DEADLINE_S)
    cluster.ps.runs.cancel(step, TaskLost("enough"))
    assert [str(error) for error in outcomes] == ["enough"]
    dead.may_end.set()
    until(lambda: not cluster.ps.peers._connecting)
    assert len(outcomes) == 1
