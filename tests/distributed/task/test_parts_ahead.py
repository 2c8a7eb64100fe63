"""Parts of steps that begin on a task ahead of the task that starts them."""

from __future__ import annotations

import queue
from typing import Any

import msgspec
import numpy as np
import pytest

from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.codec import encode_array
from dflow.distributed.wire.messages.basic import Introduce, Ok
from dflow.distributed.wire.messages.plans import Ahead, CancelStep, Registered, RegisterPlan, ReleaseStep, RunPlan
from dflow.distributed.wire.messages.transfers import Values
from dflow.lowering.programs.program import export_program
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.steps.plan import Call, Item, Plan, Read, Recv, Send
from dflow.tracing.ir.types import ArrayType
from tests.distributed.task.served_tasks import CLIENT, ONES, PS, Cluster, create, read
from tests.distributed.transports import DEADLINE_S, Recorder, reach
from tests.distributed.waiting import until

F32 = ArrayType(np.dtype("float32"), (3,))
FETCH = (Read(("w",), (0,)), Send("w", CLIENT, (0,)))
UPDATE = (Recv("grad", CLIENT, (1,), (("f32", (3,)),)), Call(0, ("w",), (), (1,), (), asynchronous=True))
COUNT = Call(1, ("count",), (), (), (), asynchronous=True)


class Client:
    """A task that starts steps on the ps, and notes the order of the values and reports that arrive."""

    def __init__(self, cluster: Cluster) -> None:
        self.arrived: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        handler = Recorder()
        handler.on_notify = self._noted  # type: ignore[method-assign]
        self.peer = reach(cluster.transport, cluster.ps.address, handler, name=CLIENT)
        self.peer.start(Introduce(0))
        create(cluster)
        create(cluster, "count", np.zeros(3, np.float32))

    def _noted(self, peer: Peer, message: Any, payload: memoryview) -> None:
        if isinstance(message, Values):
            self.arrived.put(("values", message.step))

    def register(self, cluster: Cluster, *items: Item) -> int:
        programs = [
            export_program(lambda w, x: (w + x,), (F32, F32)),
            export_program(lambda count: (count + 1,), (F32,)),
        ][: 1 + (COUNT in items)]
        plan = msgspec.msgpack.encode(Plan(PS, 4, items))
        reply = cluster.ask(RegisterPlan(plan, tuple(map(len, programs))), b"".join(programs)).message
        assert isinstance(reply, Registered)
        return reply.handle

    def run(self, handle: int, step: int, **ahead: Any) -> None:
        def replied(reply: Any) -> None:
            self.arrived.put((type(reply).__name__ if isinstance(reply, Exception) else "report", step))

        self.peer.start(RunPlan(handle, CLIENT, step, **ahead), on_reply=replied)

    def give(self, step: int) -> None:
        self.peer.notify(Values(CLIENT, step, "grad"), encode_array(ONES))

    def next(self, count: int = 1) -> list[tuple[str, int]]:
        return [self.arrived.get(timeout=DEADLINE_S) for _ in range(count)]


def waits(server: TaskServer) -> int:
    return server.statistics().rendezvous.waiters


def test_a_part_sends_values_and_changes_nothing_until_it_gets_one(cluster: Cluster) -> None:
    client = Client(cluster)
    handle = client.register(cluster, *FETCH, *UPDATE, COUNT)
    client.run(handle, 1, ahead=Ahead())
    assert client.next() == [("values", 1)]
    assert (read(cluster, "count"), cluster.ps.statistics().running) == ([0, 0, 0], 0)
    client.give(1)
    assert client.next() == [("report", 1)]
    assert (read(cluster, "count"), read(cluster)) == ([1, 1, 1], [2, 2, 2])


def test_a_release_lets_it_change_state(cluster: Cluster) -> None:
    client = Client(cluster)
    client.run(client.register(cluster, *FETCH, *UPDATE, COUNT), 1, ahead=Ahead())
    assert client.next() == [("values", 1)]
    for _ in range(2):  # the second does nothing
        client.peer.notify(ReleaseStep(CLIENT, 1))
    until(lambda: read(cluster, "count") == [1, 1, 1])
    client.give(1)
    assert client.next() == [("report", 1)]
    assert read(cluster, "count") == [1, 1, 1]
    # A release of a step that has ended, or is unknown, does nothing.
    client.peer.notify(ReleaseStep(CLIENT, 1))
    client.peer.notify(ReleaseStep(CLIENT, 7))
    assert read(cluster, "count") == [1, 1, 1]


def test_a_cancelled_part_leaves_nothing(cluster: Cluster) -> None:
    client = Client(cluster)
    handle = client.register(cluster, *FETCH, *UPDATE, COUNT)
    client.run(handle, 1, ahead=Ahead())
    client.run(handle, 2, ahead=Ahead(1))
    assert client.next() == [("values", 1)]
    for step in (2, 1):
        client.peer.call(CancelStep(CLIENT, step, "the loop ended"), timeout_s=DEADLINE_S)
    assert client.next(2) == [("StepCancelled", 2), ("StepCancelled", 1)]
    assert (read(cluster, "count"), read(cluster)) == ([0, 0, 0], [1, 1, 1])
    held = cluster.ps.statistics().rendezvous
    assert (held.open_steps, held.waiters, held.values) == (0, 0, 0)


@pytest.mark.parametrize("is_next", [True, False])
def test_a_part_ahead_begins_after_another_step_with_values_of_its_update(cluster: Cluster, is_next: bool) -> None:
    client = Client(cluster)
    handle = client.register(cluster, *FETCH, *UPDATE)
    client.run(handle, 1)
    client.run(handle, 2, ahead=Ahead(1, is_next=is_next))
    assert client.next() == [("values", 1)]
    client.give(1)
    # The worker waits for the values of the step that it calls next, and not for those of a later one.
    found = client.next(2)
    assert sorted(found) == [("report", 1), ("values", 2)]
    if not is_next:
        assert found == [("report", 1), ("values", 2)]
    client.give(2)
    assert client.next() == [("report", 2)]
    assert read(cluster) == [3, 3, 3]


def test_two_steps_ahead_after_the_same_step_are_refused(cluster: Cluster) -> None:
    client = Client(cluster)
    handle = client.register(cluster, *FETCH, *UPDATE)
    client.run(handle, 1)
    assert client.next() == [("values", 1)]
    client.run(handle, 2, ahead=Ahead(1))
    client.run(handle, 3, ahead=Ahead(1))
    assert client.next() == [("InternalError", 3)]
    assert Ok() == client.peer.call(CancelStep(CLIENT, 1, "enough"), timeout_s=DEADLINE_S).message


def test_a_part_ahead_waits_without_a_deadline(cluster: Cluster) -> None:
    client = Client(cluster)
    client.run(client.register(cluster, *FETCH, *UPDATE), 1, ahead=Ahead())
    assert client.next() == [("values", 1)]
    until(lambda: waits(cluster.ps) == 1)
    assert cluster.ps.channel.oldest_wait() == ""
    assert cluster.ps.channel.endless_waits == 0


def test_updates_by_other_steps_after_the_read_are_counted(cluster: Cluster) -> None:
    client = Client(cluster)
    handle = client.register(cluster, *FETCH, *UPDATE)
    for step in (1, 2, 3):
        client.run(handle, step, ahead=Ahead())
        assert client.next() == [("values", step)]
    for step, missed in ((2, 0), (1, 1), (3, 3)):
        client.give(step)
        assert client.next() == [("report", step)]
        assert cluster.ps.runs.missed == missed
    client.run(handle, 4)
    client.give(4)
    client.next(2)
    usage = cluster.ps.usage()
    assert (usage.updates, usage.missed) == (4, 3)


def test_updates_of_synchronous_steps_miss_none_and_are_missed_by_others(cluster: Cluster) -> None:
    client = Client(cluster)
    handle = client.register(cluster, *FETCH, *UPDATE)
    for number in (1, 2, 3):
        of = StepOfRun("run", number, is_synchronous=number < 3)
        client.run(handle, number, of=of)
        assert client.next() == [("values", number)]
    for number, missed in ((1, 0), (2, 0), (3, 2)):
        client.give(number)
        assert client.next() == [("report", number)]
        assert cluster.ps.runs.missed == missed
    assert cluster.ps.usage().updates == 1
