"""What an executable knows of its plan before a run."""

from __future__ import annotations

import pytest

from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Plan, Recv, UseResource
from dflow.tracing.ir.resource_op import ResourceOp

ADD = UseResource("sum", ResourceOp("accumulator.apply"), takes=(0,), after=(0,))


@pytest.mark.parametrize(
    ("source", "fetches", "owned"), [("worker", (), True), ("ps", (), False), ("worker", (0,), False)]
)
def test_a_resource_owns_what_other_tasks_send_for_it_alone(source: str, fetches: tuple[int, ...], owned: bool) -> None:
    received = Recv("gradient", source, (0,), (("f32", (3,)),))
    made = Executable(Plan("ps", 2, (received, ADD), fetches=fetches))
    assert made.resource_op(ADD).owned is owned
    # An operand of this task beside the received one.
    assert not made.resource_op(UseResource("sum", ADD.op, takes=(0, 1), after=(0,))).owned
