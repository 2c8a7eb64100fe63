from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.lowering.passes import fold
from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.fold import fold as folded
from dflow.lowering.pipeline import pipeline
from dflow.tracing.ir import ops
from dflow.tracing.state.queues import FIFOQueue
from dflow.tracing.syntax.text import parse
from tests.lowering.meaning import WORKER


def test_nothing_is_compiled_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_evaluated", lambda graph, nodes: pytest.fail("evaluated") if nodes else {})
    folded(
        parse("""
graph(%q: queue<i32[]>, %x: i32[]) {
  %1: i32[] = jax.neg(%x)  @/job:worker/task:0
 !%2: token = queue.enqueue(%q, %1)  @/job:worker/task:0
  return
}"""),
        WORKER,
    )


def test_numbers_are_those_of_the_call_that_would_have_made_them() -> None:
    """Integers wrap, divide and shift as in XLA, not as in Python."""
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "wraps": (jnp.add, (np.int8(100), np.int8(100))),
        "rounds down": (jnp.floor_divide, (np.int32(-7), np.int32(2))),
        "remainder": (jnp.remainder, (np.int32(-7), np.int32(4))),
        "divides by none": (jax.lax.div, (np.int32(7), np.int32(0))),
        "shifts out": (jnp.left_shift, (np.int32(7), np.int32(40))),
        "chooses": (lambda x, y: jnp.where(x > y, x, 1), (np.uint8(3), np.uint8(250))),
    }
    for name, (fn, literals) in programs.items():
        wanted = jax.jit(fn)(*literals)
        queue = FIFOQueue(2, jax.typeof(wanted))

        @dflow.jit
        def step(fn: Any = fn, literals: Any = literals, queue: Any = queue) -> jax.Array:
            queue.enqueue(fn(*literals))
            given: jax.Array = queue.dequeue()
            return given

        graph = run_passes(dflow.graph(step).graph, pipeline())
        assert not [node for node in graph.nodes if node.op is ops.xla_call], name
        assert step() == wanted, name
