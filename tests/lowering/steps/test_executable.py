"""What an executable knows of its plan before a run."""

from __future__ import annotations

from collections.abc import Set

import pytest

from dflow.lowering.steps import executable
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, UseResource
from dflow.tracing.ir.resource_op import ResourceOp
from tests.lowering.flat_programs import flat_program

GRADIENT = Recv("gradient", "worker", (0,), (("f32", (1_000,)),))
LARGE = Recv("gradient", "worker", (0,), (("f32", (10_000_000,)),))
ADD = UseResource("sum", ResourceOp("accumulator.apply"), takes=(0,), after=(0,))
SHORT = Call(0, ("w",), (), (0,), (), asynchronous=True)
LONG = Call(0, ("w",), (), (0,), (), asynchronous=True, long=True)


@pytest.mark.parametrize("on_caller", [True, False])
@pytest.mark.parametrize(
    ("items", "long"),
    [((GRADIENT, SHORT), {}), ((GRADIENT, LONG), {1}), ((GRADIENT, ADD, SHORT), {}), ((LARGE, ADD, SHORT), {1})],
)
def test_items_take_long_if_their_thread_computes_much(
    monkeypatch: pytest.MonkeyPatch, items: tuple[Item, ...], long: Set[int], on_caller: bool
) -> None:
    monkeypatch.setattr(executable, "runs_on_caller", lambda: on_caller)
    made = Executable(Plan("ps", 1, items), [flat_program(lambda w, x: [w + x], 1)])
    assert made.is_asynchronous
    assert made.long_items == ({*long} if on_caller else set())


@pytest.mark.parametrize(
    ("source", "fetches", "owned"), [("worker", (), True), ("ps", (), False), ("worker", (0,), False)]
)
def test_a_resource_owns_what_other_tasks_send_for_it_alone(source: str, fetches: tuple[int, ...], owned: bool) -> None:
    received = Recv("gradient", source, (0,), (("f32", (3,)),))
    made = Executable(Plan("ps", 2, (received, ADD), fetches=fetches))
    assert made.resource_op(ADD).owned is owned
    # An operand of this task beside the received one.
    assert not made.resource_op(UseResource("sum", ADD.op, takes=(0, 1), after=(0,))).owned
