"""What an executable knows of its plan before a run."""

from __future__ import annotations

import pytest

from dflow.lowering.steps import executable
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Plan, Recv, UseResource
from dflow.tracing.ir.resource_op import ResourceOp


@pytest.mark.parametrize("on_caller", [True, False])
@pytest.mark.parametrize("elements", [1_000, 10_000_000])
def test_a_large_gradient_is_accumulated_by_a_thread_if_that_computes(
    monkeypatch: pytest.MonkeyPatch, elements: int, on_caller: bool
) -> None:
    monkeypatch.setattr(executable, "runs_on_caller", lambda: on_caller)
    items = (
        Recv("gradient", "worker", (0,), (("f32", (elements,)),)),
        UseResource("sum", ResourceOp("accumulator.apply_gradient"), takes=(0,), after=(0,)),
    )
    assert Executable(Plan("ps", 1, items)).is_asynchronous is (elements == 1_000 or not on_caller)
