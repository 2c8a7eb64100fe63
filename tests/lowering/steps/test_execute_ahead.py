"""An execution that begins ahead runs each item once, whenever it is released."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import Channel, Deliver, StepId
from dflow.lowering.steps import compile_items
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Begins
from dflow.lowering.steps.plan import Call, Item, Plan, Read, Recv, Send
from dflow.lowering.values.payload_layout import PayloadLayout
from tests.lowering.one_process import begin

ORIGIN, TASK = "/job:worker/task:0", "/job:ps/task:0"
F32 = (("f32", ()),)
X, COUNT, SUM = np.float32(1), np.float32(2), np.float32(3)


class Wire:
    """Keeps what is sent, and delivers what the test gives."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.deliver: Deliver = lambda values: None

    def send(self, step: StepId, edge: str, destination: str, values: Sequence[Any]) -> None:
        self.sent.append(edge)

    def receive(self, step: StepId, edge: str, source: str, layout: PayloadLayout, deliver: Deliver) -> None:
        self.deliver = deliver


class Run:
    """A run of a plan: it sends a value, counts, receives a value, and adds it to the count."""

    items: tuple[Item, ...] = (
        Call(0, (), (), (), (0,)),
        Send("w", ORIGIN, (0,)),
        Call(1, (), (), (), (1,), touches_anything=True),
        Recv("x", ORIGIN, (2,), F32),
        Call(2, (), (), (1, 2), (3,), touches_anything=True),
    )
    plan = Plan(TASK, 4, items, fetches=(3,))
    feeds: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.wire = Wire()

        def program(name: str, *results: Any) -> Program:
            def call(written: Any, read: Any, *operands: Any) -> Any:
                self.calls.append((name, *operands))
                return [], list(results)

            return Program(call)

        programs = [program("read", X), program("count", COUNT), program("add", SUM)]
        begins = Begins.OWN if self.plan.task == ORIGIN else Begins.AHEAD
        self.run, self.done = begin(
            self.plan, programs, self.feeds, channel=Channel(self.wire.send, self.wire.receive), begins=begins
        )


def start(run: Run) -> None:
    run.run.start()


def release(run: Run) -> None:
    run.run.release()


def arrive(run: Run) -> None:
    run.wire.deliver([X])


ORDERS = [
    order
    for order in itertools.permutations([start, release, arrive, release])
    if order.index(start) < order.index(arrive)
]


@pytest.mark.parametrize("order", [*ORDERS, (start, arrive)], ids=lambda order: " ".join(act.__name__ for act in order))
def test_each_item_runs_once(order: Sequence[Callable[[Run], None]]) -> None:
    run = Run()
    for act in order:
        act(run)
    assert sorted(run.calls, key=str) == [("add", COUNT, X), ("count",), ("read",)]
    assert run.wire.sent == ["w"]
    assert [float(value) for (value,) in run.done] == [float(SUM)]
    assert not run.run.is_ahead


def test_before_the_release_nothing_changes() -> None:
    run = Run()
    start(run)
    assert (run.calls, run.wire.sent, run.run.is_ahead) == ([("read",)], ["w"], True)
    run.run.cancel(ValueError("the loop ended"))
    release(run)
    arrive(run)
    assert run.calls == [("read",)]
    (error,) = run.done
    assert str(error) == "the loop ended"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_of_what_is_sent_from_a_gpu_start_with_its_computation(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class OnDevice:
        def __init__(self, name: str) -> None:
            self.name = name

        def copy_to_host_async(self) -> None:
            events.append(f"copies {self.name}")

    results = [OnDevice("a"), OnDevice("kept"), OnDevice("b")]
    plan = Plan(TASK, 3, (Call(0, (), (), (), (0, 1, 2)), Send("a", ORIGIN, (0,)), Send("b", ORIGIN, (2,))))
    monkeypatch.setattr(compile_items, "has_own_memory", lambda: on_gpu)
    begin(
        plan,
        [Program(lambda written, read: ([], results))],
        channel=Channel(lambda step, edge, *_: events.append(f"sends {edge}"), Wire().receive),
    )[0].start()
    assert events == ["copies a", "copies b"] * on_gpu + ["sends a", "sends b"]


class OwnRun(Run):
    """A run ahead of the starting task's own part: a lookup by the feed, between two uses of its own variables."""

    items = (
        Call(1, (), (), (), (1,), touches_anything=True),
        Call(0, (), (), (0,), (2,)),
        Send("ids", TASK, (2,)),
        Send("count", TASK, (1,)),
        Recv("x", TASK, (3,), F32),
        Call(2, (), (), (1, 3), (4,)),
        Send("gradient", TASK, (4,)),
    )
    plan = Plan(ORIGIN, 5, items, fetches=(4,), feeds=(0,))
    feeds = (X,)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " ".join(act.__name__ for act in order))
def test_an_own_part_sends_what_its_feeds_determine_and_the_rest_after_the_release(
    order: Sequence[Callable[[Run], None]],
) -> None:
    run = OwnRun()
    for number, act in enumerate(order):
        act(run)
        if release not in order[: number + 1]:
            assert (run.calls, run.wire.sent, run.run.is_ahead) == ([("read", X)], ["ids"], True)
    assert sorted(run.calls, key=str) == [("add", COUNT, X), ("count",), ("read", X)]
    assert sorted(run.wire.sent) == ["count", "gradient", "ids"]
    assert [float(value) for (value,) in run.done] == [float(SUM)]


@pytest.mark.parametrize(
    ("items", "early"),
    [
        (OwnRun.items, {2}),
        ((Read(("w",), (1,)), Call(0, (), (), (0, 1), (2,)), Send("ids", TASK, (2,))), set()),
        ((Call(0, (), ("w",), (0,), (2,)), Send("ids", TASK, (2,)), Send("feed", TASK, (0,))), {2}),
        ((Recv("x", TASK, (1,), F32), Send("ids", TASK, (0,), after=(0,))), set()),
        ((Call(0, ("w",), (), (0,), (2,)), Send("ids", TASK, (0,), after=(0,))), set()),
    ],
)
def test_the_sends_that_the_feeds_determine(items: tuple[Item, ...], early: set[int]) -> None:
    assert Executable(Plan(ORIGIN, 5, items, feeds=(0,))).sends_of_feeds == early
