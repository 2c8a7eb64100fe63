"""The tasks that a step must release when it has begun ahead, by the plans of all tasks."""

from __future__ import annotations

import pytest

from dflow.lowering.steps.begin_ahead import released_at_call
from dflow.lowering.steps.plan import Branch, Call, Copy, Item, Plan, Read, Recv, Send, UseResource
from dflow.tracing.ir.resource_op import ResourceOp

WORKER, PS0, PS1 = "/job:worker/task:0", "/job:ps/task:0", "/job:ps/task:1"
F32 = (("f32", ()),)


def plan(task: str, *items: Item) -> Plan:
    return Plan(task, 20, items)


def fetch(ps: str, register: int) -> tuple[Item, ...]:
    return Read((f"w{ps[-1]}",), (register,)), Send(f"w{ps[-1]}", WORKER, (register,))


def update(ps: str, register: int) -> tuple[Item, ...]:
    return Recv(f"grad{ps[-1]}", WORKER, (register,), F32), Call(0, (f"w{ps[-1]}",), (), (register,), ())


def worker(*more: Item) -> Plan:
    received = (Recv("w0", PS0, (0,), F32), Recv("w1", PS1, (1,), F32))
    sent = (Send("grad0", PS0, (2,)), Send("grad1", PS1, (3,)))
    return plan(WORKER, *received, Call(0, (), (), (0, 1), (2, 3)), *sent, *more)


def released(*plans: Plan) -> tuple[str, ...] | None:
    return released_at_call({plan.task: plan for plan in plans}, WORKER)


def test_an_update_is_released_by_the_gradients() -> None:
    ps0, ps1 = plan(PS0, *fetch(PS0, 0), *update(PS0, 1)), plan(PS1, *fetch(PS1, 0), *update(PS1, 1))
    assert released(worker(), ps0, ps1) == ()


USE = UseResource("q", ResourceOp("queue.dequeue"), (), (6,))
#: The step count of an optimizer, which counts, and sends a number to the other task.
COUNT = Call(1, ("count",), (), (), (6,))
CALLBACK = Call(1, (), (), (), (6,), touches_anything=True)


@pytest.mark.parametrize("to", [WORKER, PS1])
@pytest.mark.parametrize("change", [USE, COUNT, CALLBACK], ids=["a queue", "a variable", "a callback"])
def test_a_change_without_a_value_of_the_worker_is_released_by_a_message(change: Item, to: str) -> None:
    ps0 = plan(PS0, *fetch(PS0, 0), *update(PS0, 1), change, Send("new", to, (6,)))
    new = Recv("new", PS0, (7,), F32)
    by_both = new, Call(1, ("m",), (), (7, 1), ())  # released by the gradient too
    ps1 = plan(PS1, *fetch(PS1, 0), *update(PS1, 1), *(by_both if to == PS1 else ()))
    assert released(worker(*([new] if to == WORKER else [])), ps0, ps1) == (PS0,)


def test_a_change_by_another_tasks_value_is_released() -> None:
    ps0 = plan(PS0, *fetch(PS0, 0), *update(PS0, 1), Send("copy", PS1, (0,)))
    ps1 = plan(PS1, *fetch(PS1, 0), *update(PS1, 1), Recv("copy", PS0, (5,), F32), Call(1, ("copy",), (), (5,), ()))
    assert released(worker(), ps0, ps1) == (PS1,)


def test_so_is_a_change_that_comes_after_the_workers_values_only_on_another_task() -> None:
    only0 = plan(WORKER, Recv("w0", PS0, (0,), F32), Call(0, (), (), (0,), (2,)), Send("grad0", PS0, (2,)))
    ps0 = plan(PS0, *fetch(PS0, 0), *update(PS0, 1), Read(("w0",), (3,), after=(3,)), Send("copy", PS1, (3,)))
    ps1 = plan(PS1, Recv("copy", PS0, (5,), F32), Call(1, ("copy",), (), (5,), ()))
    assert released(only0, ps0, ps1) == (PS1,)


def test_a_plan_with_copies_begins_ahead() -> None:
    copied = Read(("w0",), (0,)), Copy("cpu:0", 0, 4), Send("w0", WORKER, (4,))
    assert released(worker(), plan(PS0, *copied, *update(PS0, 1)), plan(PS1, *fetch(PS1, 0), *update(PS1, 1))) == ()


def test_a_plan_with_branches_cannot_begin_ahead() -> None:
    ps0 = Plan(PS0, 9, (*fetch(PS0, 0), *update(PS0, 1), Branch((0,), (1,), ())), bodies=(Plan(PS0, 9, ()),))
    assert released(worker(), ps0, plan(PS1, *fetch(PS1, 0), *update(PS1, 1))) is None
