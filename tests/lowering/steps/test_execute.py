"""One task's partition of a step: dependencies of items, and the end of an execution."""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.programs.program import Program, lower_program
from dflow.lowering.queues.channel import NotConnected, StepId
from dflow.lowering.state.store import Store
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Execution, Fetches
from dflow.lowering.steps.local_step import fetched
from dflow.lowering.steps.plan import Call, Copy, Item, Plan, Recv, Send, UseResource
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import InternalError, StepCancelled
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType
from tests.lowering.flat_programs import flat_program
from tests.lowering.meaning import PS_0, WORKER
from tests.lowering.one_process import Mail, Mailbox, begin

F32 = ArrayType(np.dtype("float32"), ())
STEP = StepId(WORKER, 1)
ONE = jnp.float32(1)


class Task:
    """A task, its messages from and to another task, and its executions. Submitted work waits for a call of `work`."""

    def __init__(self, *programs: Program) -> None:
        self.mail, self.outcomes = Mail(), list[Outcome[Fetches]]()
        self.submitted: list[Callable[[], None]] = []
        self.programs = programs

    def execution(self, *items: Item, registers: int = 9, feeds: Any = (), fetches: Sequence[int] = ()) -> Execution:
        """Make an execution of a plan without starting it; `feeds` maps registers to values."""
        feeds = dict(feeds)
        names = tuple(f"%{index} (op)\n  at x.py:{index}" for index in range(len(items)))
        plan = Plan(WORKER, registers, items, tuple(feeds), tuple(fetches), names=names)
        values, channel = [*feeds.values()], Mailbox(self.mail, WORKER).channel
        run, self.outcomes = begin(plan, self.programs, values, channel=channel, submit=self.submitted.append)
        return run

    def start(self, *items: Item, **options: Any) -> Execution:
        """Start a plan."""
        execution = self.execution(*items, **options)
        execution.start()
        return execution

    def arrive(self, edge: str, value: Any) -> None:
        """Deliver a value from the other task."""
        self.mail.put((STEP, edge, PS_0, WORKER), value if isinstance(value, BaseException) else [value])

    def work(self) -> None:
        """Do all submitted work."""
        while self.submitted:
            self.submitted.pop()()

    @property
    def sent(self) -> dict[str, Any]:
        """Values sent to the other task, by edge."""
        return {edge: value for (_, edge, _, to), [value] in self.mail.values.items() if to == PS_0}


def calls(log: list[int], count: int) -> list[Program]:
    """Programs that record their runs and return their number."""

    def run(index: int, *_: Any) -> list[jax.Array]:
        log.append(index)
        return [jnp.float32(index)]

    return [flat_program(functools.partial(run, index)) for index in range(count)]


def call(program: int, *takes: int, gives: int, after: Sequence[int] = ()) -> Call:
    return Call(program, (), (), takes, (gives,), tuple(after))


def recv(edge: str, give: int) -> Recv:
    return Recv(edge, PS_0, (give,), (("f32", ()),))


def send(edge: str, take: int, *after: int) -> Send:
    return Send(edge, PS_0, (take,), after)


# Dependencies.


@given(data=st.data())
def test_order_edges_are_kept_in_any_order_of_items_and_arrivals(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    log: list[int] = []
    task = Task(*calls(log, count))
    after = {index: data.draw(st.sets(st.integers(0, index - 1))) if index else set() for index in range(count)}
    places = data.draw(st.permutations(range(2 * count)))
    items: list[Item] = [send("unused", 0)] * (2 * count)
    for index in range(count):
        items[places[index]] = call(index, 10 + index, gives=index, after=[places[other] for other in after[index]])
        items[places[count + index]] = recv(f"edge {index}", 10 + index)
    task.start(*items, registers=20, fetches=range(count))
    for index in data.draw(st.permutations(range(count))):
        assert not task.outcomes
        task.arrive(f"edge {index}", ONE)
        if data.draw(st.booleans()):
            task.work()
    task.work()
    assert sorted(log) == list(range(count))
    assert all(log.index(other) < log.index(index) for index in range(count) for other in after[index])
    assert [value.item() for value in fetched(task.outcomes[0])] == list(range(count))
    assert len(task.outcomes) == 1


def test_a_value_is_let_go_of_when_all_that_take_it_are_done() -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    def run(*_: Any) -> list[jax.Array]:
        alive.append([ref() is not None for ref in made])
        result = jnp.float32(len(made))
        made.append(weakref.ref(result))
        return [result]

    task = Task(flat_program(run))
    items = call(0, gives=0), call(0, 0, gives=1), call(0, 0, gives=2, after=[1]), call(0, 2, gives=3, after=[2])
    task.start(*items, call(0, gives=4, after=[3]), fetches=(1,))
    # Value 3, which no item takes, is freed immediately.
    assert alive == [[], [True], [True, True], [False, True, True], [False, True, False, False]]
    assert task.outcomes == [(jnp.float32(1),)]


class Computed:
    """A stand-in for an array that records when its value is waited for."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def block_until_ready(self) -> Computed:
        self._log.append("waited")
        return self


def test_a_copy_on_the_cpu_waits_for_what_it_comes_after_when_all_else_has_been_started() -> None:
    log: list[Any] = []

    def run(name: str, *_: Any) -> list[Any]:
        log.append(name)
        return [Computed(log)]

    task = Task(*(flat_program(functools.partial(run, name)) for name in ("before", "beside", "user")))
    copy = Copy("cpu:0", 0, 2, (0,))
    items = call(0, 0, gives=1), copy, call(1, 1, gives=3), call(2, 2, gives=4)
    task.start(*items, feeds={0: ONE}, fetches=(2,))
    assert log == ["before", "beside"]
    assert not task.outcomes
    task.work()
    assert log == ["before", "beside", "waited", "user"]
    assert task.outcomes == [(ONE,)]


def test_what_a_copy_waits_for_may_have_failed() -> None:
    class Failed(Computed):
        def block_until_ready(self) -> Computed:
            raise ValueError("computed in vain")

    task = Task(flat_program(lambda *_: [Failed([])]))
    task.start(call(0, gives=1), Copy("cpu:0", 0, 2, (0,)), feeds={0: ONE}, fetches=(2,))
    task.work()
    with pytest.raises(ValueError, match="computed in vain"):
        fetched(task.outcomes[0])


def test_what_a_value_makes_ready_is_done_by_a_worker_not_by_who_delivers_it() -> None:
    log: list[int] = []
    task = Task(*calls(log, 1))
    task.start(recv("x", 0), call(0, 0, gives=1))
    task.arrive("x", ONE)
    assert log == []
    assert len(task.submitted) == 1
    task.work()
    assert log == [0]


def test_receives_are_left_before_anything_is_sent() -> None:
    task = Task()
    task.start(send("there", 0), recv("back", 1), feeds={0: ONE})
    assert task.mail.log == [("receive", "back"), ("send", "there")]


def test_a_send_waits_for_what_it_comes_after() -> None:
    task = Task()
    task.start(send("there", 0, 1), recv("first", 1), feeds={0: ONE})
    assert task.sent == {}
    task.arrive("first", ONE)
    task.work()
    assert task.sent == {"there": ONE}


# The end of an execution.


def test_feeds_are_counted() -> None:
    plan = Plan(WORKER, 2, (), (0, 1), ())
    with pytest.raises(InternalError, match="the plan of /job:worker/task:0 takes 2 feeds but was given 1"):
        begin(plan, feeds=[ONE])


def failing(error: BaseException) -> Program:
    def fail(*_: Any) -> Any:
        raise error

    return flat_program(fail)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt("stop")], ids=["error", "interrupt"])
def test_the_first_error_ends_the_execution_once(error: BaseException) -> None:
    log: list[int] = []
    task = Task(failing(error), *calls(log, 1))
    task.start(call(0, gives=0), call(1, 0, gives=1), call(1, gives=2, after=[0]), recv("x", 3))
    assert task.outcomes == [error]
    task.arrive("x", ONE)
    task.work()
    assert task.outcomes == [error]
    assert log == []


def test_an_error_that_arrives_ends_the_execution() -> None:
    task, error = Task(), StepCancelled("the peer gave up")
    task.start(recv("x", 0), recv("y", 1))
    task.arrive("x", error)
    task.arrive("y", StepCancelled("another"))
    assert task.outcomes == [error]


@pytest.mark.parametrize("arrives_first", [True, False])
def test_after_the_end_nothing_runs(arrives_first: bool) -> None:
    log: list[int] = []
    task, error = Task(*calls(log, 1)), StepCancelled("cancelled")
    execution = task.start(recv("x", 0), call(0, 0, gives=1))
    if arrives_first:
        task.arrive("x", ONE)
    execution.cancel(error)
    if not arrives_first:
        task.arrive("x", ONE)
        assert task.submitted == []
    task.work()
    assert (log, task.outcomes, getattr(error, "__notes__", [])) == ([], [error], [])


def test_cancel_before_the_start() -> None:
    log: list[int] = []
    task, error = Task(*calls(log, 1)), StepCancelled("cancelled")
    several: list[list[Item]] = [[call(0, gives=0), recv("x", 1)], []]
    for items in several:
        execution = task.execution(*items)
        execution.cancel(error)
        execution.start()
        assert task.outcomes == [error]
    assert log == []
    assert task.mail.waiting == {}


def test_a_cancel_after_the_end_or_after_another_changes_nothing() -> None:
    task = Task(*calls([], 1))
    execution = task.start(call(0, gives=0), fetches=(0,))
    execution.cancel(StepCancelled("too late"))
    assert task.outcomes == [(jnp.float32(0),)]
    execution = task.start(recv("x", 0))
    execution.cancel(error := StepCancelled("first"))
    execution.cancel(StepCancelled("second"))
    assert task.outcomes == [error]


class Connecting(Mailbox):
    """A channel without a connection; `waiting` are the callbacks for when there is one."""

    def __init__(self, mail: Mail, task: str) -> None:
        super().__init__(mail, task)
        self.is_connected = False
        self.waiting: list[Callable[[Exception | None], None]] = []

    def send(self, step: StepId, edge: str, destination: str, values: Sequence[Any]) -> None:
        if not self.is_connected:
            raise NotConnected(self.waiting.append)
        super().send(step, edge, destination, values)


@pytest.fixture
def connecting(monkeypatch: pytest.MonkeyPatch) -> tuple[Task, Connecting]:
    task = Task(*calls([], 3))
    channel = Connecting(task.mail, WORKER)
    monkeypatch.setitem(globals(), "Mailbox", lambda mail, name: channel)
    return task, channel


def test_a_send_is_repeated_when_its_destination_is_connected(connecting: tuple[Task, Connecting]) -> None:
    task, channel = connecting
    items = call(0, gives=0), call(1, gives=1), send("x", 1), send("y", 0, 2), call(2, 0, gives=2, after=[3])
    task.start(*items, fetches=(2,))
    channel.waiting.pop()(None)  # the connection is lost again before the send is repeated
    task.work()
    assert (task.outcomes, task.sent, len(channel.waiting)) == ([], {}, 1)
    channel.is_connected = True
    channel.waiting.pop()(None)
    assert task.outcomes == []  # a thread that the caller of `start` chooses runs the rest
    task.work()
    assert task.sent == {"x": 1, "y": 0}
    assert task.outcomes == [(jnp.float32(2),)]


def test_a_destination_that_cannot_be_connected_ends_the_execution(connecting: tuple[Task, Connecting]) -> None:
    task, channel = connecting
    execution = task.start(send("x", 0), recv("y", 1), feeds={0: ONE})
    channel.waiting.pop()(error := ConnectionError("no way there"))
    assert task.outcomes == [error]
    execution.cancel(StepCancelled("too late"))
    assert task.outcomes == [error]


def test_a_send_is_not_repeated_after_the_end(connecting: tuple[Task, Connecting]) -> None:
    task, channel = connecting
    execution = task.start(send("x", 0), feeds={0: ONE})
    execution.cancel(error := StepCancelled("enough"))
    channel.is_connected = True
    channel.waiting.pop()(None)
    task.work()
    assert (task.outcomes, task.sent) == ([error], {})


# Many threads.


def test_values_that_arrive_on_many_threads_end_it_once() -> None:
    add = lower_program(lambda x, y: [x + y], [F32] * 2, 0).compile()
    width, rounds = 8, 20
    items: list[Item] = [recv(f"edge {index}", index) for index in range(width)]
    items += [Call(0, (), (), (width + index, index), (width + index + 1,)) for index in range(width)]
    with ThreadPoolExecutor(8) as pool:
        for _ in itertools.repeat(None, rounds):
            task, done = Task(add), Future[Outcome[Fetches]]()
            plan = Plan(WORKER, 2 * width + 1, tuple(items), (width,), (2 * width,))
            run_of(
                Executable(plan, [add]),
                Store(),
                Mailbox(task.mail, WORKER).channel,
                STEP,
                [ONE],
                done.set_result,
                pool.submit,
            ).start()
            order = random.Random(0).sample(range(width), width)
            list(pool.map(lambda index, task=task: task.arrive(f"edge {index}", jnp.float32(index)), order))
            assert fetched(done.result())[0] == 1 + sum(range(width))


# The node of an error.


@pytest.mark.parametrize(
    ("items", "node"),
    [
        ([call(0, gives=0), call(1, 0, gives=1)], 1),
        ([send("there", 8), recv("x", 0)], 1),
        ([UseResource("no such queue", ResourceOp("queue.dequeue"), gives=(0,))], 0),
        ([call(2, gives=0)], None),
    ],
    ids=["a call", "a transfer", "a resource", "an interrupt"],
)
def test_an_error_names_its_node_and_line_and_an_interrupt_none(items: list[Item], node: int | None) -> None:
    task = Task(*calls([], 1), failing(ValueError("bad")), failing(KeyboardInterrupt()))
    task.start(*items, feeds={8: ONE})
    if not task.outcomes:
        task.arrive("x", ConnectionError("gone"))
    [error] = task.outcomes
    assert getattr(error, "__notes__", []) == ([] if node is None else [f"in %{node} (op)\n  at x.py:{node}"])


def test_a_long_chain_of_waits() -> None:
    count = 1000
    items = [Recv(f"e{n}", PS_0, (n,), (("f32", ()),), (n - 1,) if n else ()) for n in range(count)]
    task = Task(*calls([], 1))
    task.start(*items, call(0, *range(count), gives=count), registers=count + 1, fetches=(count,))
    for n in range(count):
        assert not task.outcomes
        task.arrive(f"e{n}", ONE)
        task.work()
    assert task.outcomes == [(0,)]
