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
    # The second op also takes an operand of this task.
    both = UseResource("sum", ADD.op, takes=(0, 1), after=(0,))
    made = Executable(Plan("ps", 2, (received, ADD, both), fetches=fetches))
    assert {index: op.owned for index, op in made.resource_ops.items()} == {1: owned, 2: False}
