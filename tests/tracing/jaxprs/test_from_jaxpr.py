"""Functions and their graphs: the pairs `<function> --- <graph>` of from_jaxpr.graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.tracing.derivatives.autodiff import grad, value_and_grad
from dflow.tracing.devices.device import device_scope, with_state
from dflow.tracing.devices.device_name import full_device_name
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.accumulators import ConditionalAccumulator
from dflow.tracing.state.resources import Variable, name
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.golden import GoldenCase, check, golden_cases
from tests.graphs_ import a_home

X = np.array([1.0, 2.0, 3.0], np.float32)


def scope() -> dict[str, Any]:
    """Names that the functions of the golden file may use."""
    with a_home():
        w, count = Variable(jnp.zeros(3), name="w"), Variable(jnp.zeros(()), name="count")
        held = ConditionalAccumulator(jnp.zeros(3), name="held")

    def device(written: str) -> AbstractContextManager[None]:
        return device_scope(full_device_name(written))

    modules = {"jax": jax, "jnp": jnp, "device": device, "with_state": with_state, "name": name}
    return modules | {
        "w": w,
        "count": count,
        "held": held,
        "table": X + 1,
        "grad": grad,
        "value_and_grad": value_and_grad,
    }


@pytest.mark.parametrize("case", golden_cases(Path(__file__).parent / "from_jaxpr.graphs"))
def test_a_function_becomes_this_graph(case: GoldenCase) -> None:
    names = scope()
    exec(compile(case.input, "step.py", "exec"), names)
    graph = trace(names["step"], (X,), {}).graph
    verify(graph)
    printed = text(graph)
    assert text(parse(printed)) == printed
    check(case, printed)


def test_lines_inside_a_scan_body_are_the_users() -> None:
    def step(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            return carry + row, None  # the marked line

        return jax.lax.scan(body, jnp.float32(0), x)[0]

    graph = trace(step, (X,), {}).graph
    marked = step.__code__.co_firstlineno + 2
    assert f"jax.add(%a, %b)  # test_from_jaxpr.py:{marked}" in text(graph)


def test_arguments_are_named_by_parameter_and_path() -> None:
    traced = trace(lambda params, *rest, scale: params["a"][0] * scale + rest[0], ({"a": [X]}, X), {"scale": 2.0})
    assert [value.name for value in traced.graph.inputs] == ["params/a/0", "arg_1", "scale"]
