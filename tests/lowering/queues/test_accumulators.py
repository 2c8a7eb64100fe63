"""Accumulators held by a process, without the API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflow.lowering.queues.accumulators import HeldAccumulator
from dflow.lowering.queues.pending_operations import wait
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import AccumulatorType, ArrayType

F32 = np.dtype("float32")


def held() -> HeldAccumulator:
    settings = AccumulatorSettings(Reduction.MEAN)
    return HeldAccumulator("sum", settings, AccumulatorType((ArrayType(F32, (4,)),)))


def result(accumulator: HeldAccumulator, op: ResourceOp, *operands: Any) -> Any:
    """The last result of an op."""
    return wait(lambda on_done: accumulator.start(op, operands, on_done))[-1]


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_gradient_is_copied_unless_it_is_owned(owned: bool, keeps: bool) -> None:
    accumulator, gradient = held(), np.arange(4, dtype=F32)
    if keeps:
        ticket = result(accumulator, ResourceOp("accumulator.keep", owned=owned), gradient, 0)
        taken = result(accumulator, ResourceOp("accumulator.take_kept"), np.array([ticket]))
    else:
        assert result(accumulator, ResourceOp("accumulator.apply", owned=owned), gradient, 0)
        taken = result(accumulator, ResourceOp("accumulator.take", 1))
    assert np.shares_memory(taken, gradient) is owned
    np.testing.assert_array_equal(taken, gradient)
