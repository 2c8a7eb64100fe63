"""The estimate, before a run, that a call does not block its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.steps.lowered import make_plans
from dflow.lowering.steps.plan import Call
from dflow.tracing.jaxprs.trace import trace

WIDE = np.zeros((512, 512), np.float32)
SMALL = np.zeros((16, 16), np.float32)
ROWS = np.zeros(8, np.int32)


def is_asynchronous(fn: Callable[..., Any], *args: Any) -> bool:
    """Whether the function's call is asynchronous."""
    graph = run_passes(trace(fn, args, {}).graph, pipeline(), check=True)
    [call] = [item for item in make_plans(graph, ALONE, {})[ALONE].plan.items if isinstance(item, Call)]
    return call.asynchronous


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (jnp.add, (SMALL, SMALL), True),
        (jnp.matmul, (SMALL, SMALL), True),
        (jnp.matmul, (WIDE, WIDE), True),
        (jnp.sum, (WIDE,), True),
        (lambda x: x + 1, (WIDE,), True),
        (lambda table, rows: table[rows], (WIDE, ROWS), True),
        (lambda table, rows: table.at[rows].add(1.0), (WIDE, ROWS), True),
        (lambda x: jax.lax.dynamic_slice(x, (3, 0), (1, 8)), (WIDE,), True),
        (lambda x: x.reshape(-1)[0], (WIDE,), True),
        (jnp.transpose, (WIDE,), True),
        (lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0), (np.int32(3),), False),
        (lambda x: jax.lax.scan(lambda c, _: (c + x, None), x, length=3)[0], (SMALL,), True),
        (lambda x: jax.lax.scan(lambda c, _: (c + x, None), x, length=10_000)[0], (SMALL,), True),
        (lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((16, 16), "float32"), x), (SMALL,), False),
        (jnp.linalg.cholesky, (SMALL,), True),
        (jnp.linalg.svd, (np.zeros((128, 128), np.float32),), True),
    ],
)
def test_a_call_is_asynchronous_when_little_is_to_be_done_and_that_is_known(
    fn: Callable[..., Any], args: tuple[Any, ...], expected: bool
) -> None:
    assert is_asynchronous(fn, *args) is expected
