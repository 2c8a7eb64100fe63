"""Values that are not received: memory stays bounded, and every wait ends, for any order of receives."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.steps.flow_control import COST_BYTES, Inflow, Offered, Outflow, Reaction
from dflow.distributed.steps.task_channel import TaskChannel
from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.wire.messages.plans import CancelStep
from dflow.distributed.wire.messages.transfers import Credit, Offer, Pull, Values
from dflow.lowering.queues.channel import StepId
from dflow.lowering.values.computed import before_waiting
from dflow.lowering.values.payload_layout import PayloadLayout
from dflow.tracing.errors import StepCancelled, TransportClosed
from tests.distributed.task.served_tasks import CLIENTS, roster
from tests.distributed.transports import DEADLINE_S, KINDS, Kind
from tests.effort import examples
from tests.manual_clock import ManualClock

WINDOW = 10_000
PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
STEP = StepId(WORKER, 1)
#: Connections.
SENDER, RECEIVER, OTHER, ENDED = (cast(Any, name) for name in ("sender", "receiver", "other", "ended"))


@dataclass
class Model:
    """A sender and a receiver, the messages between them, and the values sent, requested and received."""

    outflow: Outflow[int] = field(default_factory=lambda: Outflow(WINDOW))
    inflow: Inflow = field(default_factory=lambda: Inflow(WINDOW))
    to_receiver: deque[tuple[str, str, int]] = field(default_factory=deque)
    to_sender: deque[Reaction] = field(default_factory=deque)
    lying: dict[str, int] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    got: list[str] = field(default_factory=list)
    is_ended: bool = False

    def send(self, edge: str, size: int) -> None:
        if self.outflow.pushes(RECEIVER, size):
            self.to_receiver.append(("value", edge, size))
        else:
            self.outflow.kept[Offered(RECEIVER, STEP, edge)] = size
            self.to_receiver.append(("offer", edge, size))

    def want(self, edge: str) -> None:
        if self.is_ended:
            return
        if edge in self.lying:
            del self.lying[edge]
            self.got.append(edge)
            self.to_sender.extend(self.inflow.taken(STEP, edge))
        else:
            self.wanted.add(edge)
            self.to_sender.extend(self.inflow.awaited(STEP, edge))

    def end(self) -> None:
        self.is_ended = True
        self.lying.clear()
        self.wanted.clear()
        self.to_sender.extend(self.inflow.ended(STEP))

    def deliver_to_receiver(self) -> None:
        kind, edge, size = self.to_receiver.popleft()
        is_awaited = edge in self.wanted
        if kind == "offer":
            self.to_sender.extend(
                self.inflow.offer(SENDER, STEP, edge, size, is_awaited=is_awaited, is_open=not self.is_ended)
            )
            return
        self.wanted.discard(edge)
        if is_awaited:
            self.got.append(edge)
        elif not self.is_ended:
            self.lying[edge] = size
        if kind != "value":
            self.to_sender.extend(self.inflow.pulled(STEP, edge))
        elif edge in self.lying:
            self.inflow.hold(SENDER, STEP, edge, size)
        else:
            self.to_sender.extend(self.inflow.used(SENDER, size))

    def deliver_to_sender(self) -> None:
        match self.to_sender.popleft()[1]:
            case Credit(size_bytes):
                self.outflow.credit(RECEIVER, size_bytes)
            case Pull(_, _, edge, wanted):
                size = self.outflow.kept.pop(Offered(RECEIVER, STEP, edge))
                if wanted:
                    self.to_receiver.append(("pulled", edge, size))

    def check(self) -> None:
        lying = sum(self.lying.values()) + COST_BYTES * len(self.lying)
        assert lying <= WINDOW
        pulled = [size for kind, _, size in self.to_receiver if kind == "pulled"]
        assert self.inflow.requested_bytes <= WINDOW or len(pulled) <= 1
        assert self.is_ended or sum(pulled) <= self.inflow.requested_bytes
        assert len(self.got) == len(set(self.got))

    def settle(self) -> None:
        while self.to_receiver or self.to_sender:
            if self.to_receiver:
                self.deliver_to_receiver()
            if self.to_sender:
                self.deliver_to_sender()
            self.check()


@settings(max_examples=examples(150), deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 10, 2000, WINDOW // 2, WINDOW, 3 * WINDOW]), min_size=1, max_size=30),
    seed=st.integers(0, 1 << 30),
    ends=st.booleans(),
)
def test_whatever_the_order_each_wanted_value_comes_once_and_no_more_than_the_window_lies_untaken(
    sizes: list[int], seed: int, ends: bool
) -> None:
    draw = random.Random(seed)
    model = Model()
    edges = [f"edge {number}" for number in range(len(sizes))]
    sending = list(zip(edges, sizes, strict=True))
    wanting = list(edges)
    draw.shuffle(wanting)
    while sending or wanting:
        ways = [model.deliver_to_receiver] * bool(model.to_receiver) + [model.deliver_to_sender] * bool(model.to_sender)
        if sending:
            ways.append(lambda: model.send(*sending.pop(0)))
        if wanting and not (ends and len(wanting) <= 3):
            ways.append(lambda: model.want(wanting.pop()))
        elif not sending:
            break
        draw.choice(ways)()
        model.check()
    if ends:
        model.end()
    model.settle()
    if not ends:
        assert sorted(model.got) == sorted(edges)
    assert len(model.outflow.kept) == model.inflow.offered == model.inflow.held == model.inflow.requested_bytes == 0
    assert model.outflow.untaken[RECEIVER] < WINDOW // 4 + max(sizes) + COST_BYTES


def test_a_connection_that_has_ended_leaves_nothing() -> None:
    outflow: Outflow[str] = Outflow(WINDOW)
    assert outflow.pushes(ENDED, WINDOW - COST_BYTES)
    assert not outflow.pushes(ENDED, 1)
    assert outflow.pushes(OTHER, 1)
    outflow.kept[Offered(ENDED, STEP, "e")] = "kept"
    outflow.forget(ENDED.__eq__)
    assert not outflow.kept
    assert [*outflow.untaken] == [OTHER]
    outflow.credit(OTHER, 1 + COST_BYTES)
    assert not outflow.untaken
    inflow = Inflow(WINDOW)
    inflow.hold(ENDED, STEP, "held", WINDOW)
    inflow.offer(ENDED, STEP, "offered", 1, is_awaited=False, is_open=True)
    inflow.forget(ENDED.__eq__)
    assert inflow.ended(STEP) == []


def test_the_window_is_shared_by_the_senders_and_credit_comes_before_a_share_is_used_up() -> None:
    outflow, inflow = Outflow[str](WINDOW), Inflow(WINDOW)
    outflow.senders = inflow.senders = 4
    size = WINDOW // 16
    sent = 0
    while outflow.pushes(RECEIVER, size):
        sent += 1
    assert sent * (size + COST_BYTES) <= WINDOW // 4
    credits = [one for n in range(sent) for one in inflow.used(SENDER, size)]
    for _, credit in credits:
        assert isinstance(credit, Credit)
        outflow.credit(RECEIVER, credit.size_bytes)
    assert outflow.pushes(RECEIVER, size)


# Between tasks.

SIZE = 1 << 16


@pytest.fixture(params=["memory", "task"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TaskServer, TaskServer]]:
    """A worker that sends, and a ps that receives, where each sender's share of the window is four values."""
    kind: Kind = KINDS[request.param]
    transport = kind.make(None)
    chosen = TaskSettings(window_bytes=(1 + len(CLIENTS)) * 4 * (SIZE + COST_BYTES))
    made = tuple(TaskServer(name, transport, (), address=kind.free, settings=chosen) for name in (WORKER, PS))
    for server in made:
        server.roster_changed(roster(*made))
    made[0].peer(PS)  # plans connect a destination before they send to it
    yield made[0], made[1]
    for server in made:
        server.close()


def value(number: int) -> np.ndarray[Any, Any]:
    return np.full(SIZE // 4, number, np.int32)


def kept(sender: TaskServer) -> int:
    """Number of offered values that the sender keeps."""
    return len(sender.channel._outflow.kept)


def got(
    taker: TaskServer, step: StepId, edge: str, dtype: str = "i32", shape: tuple[int, ...] = (SIZE // 4,)
) -> queue.SimpleQueue[Any]:
    """Wait at `taker` for the value of an edge; return the queue that gets a list of it."""
    box: queue.SimpleQueue[Any] = queue.SimpleQueue()
    taker.channel.receive(step, edge, WORKER, PayloadLayout([(dtype, shape)]), box.put)
    return box


def test_values_in_any_order_come_to_a_slow_task_whose_memory_stays_bounded(
    pair: tuple[TaskServer, TaskServer],
) -> None:
    worker, ps = pair
    edges = [f"edge {number}" for number in range(40)]
    for number, edge in enumerate(edges):
        worker.channel.send(STEP, edge, PS, [value(number)])
    assert kept(worker) == 36
    wanted = list(enumerate(edges))
    random.Random(0).shuffle(wanted)
    for number, edge in wanted:
        (taken,) = got(ps, STEP, edge).get(timeout=DEADLINE_S)
        assert ps.channel._inflow.held <= 4
        np.testing.assert_array_equal(np.asarray(taken), value(number))
    # The thread that sent the last value records that before it handles the next answer.
    reach_and_ask(worker)
    assert kept(worker) == 0
    assert sum(one.values for one in worker.channel.traffic()) == 40


def test_a_reader_that_waits_for_a_value_lets_others_read(pair: tuple[TaskServer, TaskServer]) -> None:
    worker, ps = pair
    ways: list[bool] = []
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: x @ y, x)[0, 0])
    identity = jnp.eye(1000)
    jax.block_until_ready(multiply(identity))
    slow = multiply(identity)

    def send_as_reader() -> None:
        before_waiting(lambda: ways.append(slow.is_ready()))
        worker.channel.send(STEP, "slow", PS, [slow])
        worker.channel.send(STEP, "there", PS, [slow])

    reader = threading.Thread(target=send_as_reader)
    reader.start()
    assert got(ps, STEP, "slow", "f32", ()).get(timeout=DEADLINE_S) == [1]
    reader.join(DEADLINE_S)
    assert ways == [False]


def reach_and_ask(worker: TaskServer) -> None:
    worker.peer(PS).call(CancelStep(worker.name, 1, "nothing"), timeout_s=DEADLINE_S)


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_offers_of_a_cancelled_step_are_dropped(pair: tuple[TaskServer, TaskServer], by: str) -> None:
    worker, ps = pair
    for number in range(10):
        worker.channel.send(STEP, f"edge {number}", PS, [value(number)])
    assert kept(worker) == 6
    reach_and_ask(worker)
    if by == "sender":
        worker.runs.cancel(STEP, StepCancelled("given up"))
    else:
        ps.runs.cancel(STEP, StepCancelled("given up"))
        reach_and_ask(worker)
        assert ps.channel._inflow.offered == ps.channel._inflow.held == 0
    assert kept(worker) == 0


def test_a_value_whose_offer_fails_is_dropped(
    pair: tuple[TaskServer, TaskServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = pair
    for number in range(4):
        worker.channel.send(STEP, f"edge {number}", PS, [value(number)])

    def fail(*_: Any) -> None:
        raise TransportClosed("the connection has ended")

    monkeypatch.setattr(type(worker.peer(PS)), "notify", fail)
    with pytest.raises(TransportClosed, match="the connection has ended"):
        worker.channel.send(STEP, "beyond the window", PS, [value(4)])
    assert kept(worker) == 0


class Connection:
    """A connection that keeps what is sent over it."""

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, ""
        self.sent: list[Any] = []

    def notify(self, message: Any, payload: Any = b"") -> None:
        self.sent.append(message)


@pytest.fixture
def two() -> tuple[TaskChannel, Connection, Connection]:
    """A channel of one task, which sends over the first of its two connections to another; a window of four values."""
    one, other = Connection(PS), Connection(PS)
    peers: Any = SimpleNamespace(connected=lambda task: one)
    window = 4 * (SIZE + COST_BYTES)
    return TaskChannel(WORKER, peers, wait_timeout_s=60, clock=ManualClock(), window_bytes=window), one, other


def lose(channel: TaskChannel, connection: Any) -> None:
    connection.closed = "cut"
    channel.connection_lost(connection, TransportClosed("cut"))


def test_offers_over_one_of_two_connections_outlast_the_other(two: tuple[TaskChannel, Any, Any]) -> None:
    channel, one, other = two
    for number in range(5):
        channel.send(STEP, f"edge {number}", PS, [value(number)])
    lose(channel, other)
    channel.pulled(Pull(WORKER, 1, "edge 4", wanted=True), one)
    assert one.sent[-1] == Values(WORKER, 1, "edge 4", was_offered=True)
    channel.send(STEP, "edge 5", PS, [value(5)])
    assert isinstance(one.sent[-1], Offer), "the window is as full as before"
    lose(channel, one)
    assert not channel._outflow.kept
    assert not channel._outflow.untaken


def test_credit_goes_over_the_connection_of_the_values(two: tuple[TaskChannel, Any, Any]) -> None:
    channel, one, other = two
    payload = memoryview(bytes(SIZE))
    channel.arrived(Values(WORKER, 1, "edge"), payload, one)
    channel.offered(Offer(WORKER, 1, "offered", SIZE), other)
    lose(channel, other)
    channel.receive(STEP, "edge", PS, PayloadLayout([("i32", (SIZE // 4,))]), lambda _: None)
    assert one.sent == [Credit(SIZE + COST_BYTES)]
    assert not other.sent


def test_what_comes_from_a_connection_after_its_end_is_not_kept(two: tuple[TaskChannel, Any, Any]) -> None:
    channel, one, _ = two
    lose(channel, one)
    channel.arrived(Values(WORKER, 1, "edge"), memoryview(bytes(4)), one)
    channel.offered(Offer(WORKER, 1, "offered", SIZE), one)
    taken: list[Any] = []
    channel.receive(STEP, "edge", PS, PayloadLayout([("i32", ())]), taken.append)
    assert taken == [[0]]
    assert channel._inflow.held == channel._inflow.offered == len(channel._inflow._owed) == len(one.sent) == 0
