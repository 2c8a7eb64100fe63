from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from dflow.lowering.passes.merge import merge
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.syntax.text import parse, text


def test_nodes_whose_attributes_cannot_be_compared_are_never_shared() -> None:
    graph = parse("""
graph(%x: i32[2,2]) {
  %1: i32[2,2] = jax.transpose(%x) {permutation=[1, 0]}
  %2: i32[2,2] = jax.transpose(%x) {permutation=[1, 0]}
  return %1, %2
}""")
    assert text(merge(graph)) == text(graph)


def test_attributes_that_compare_equal_and_have_another_type_or_other_bits_are_told_apart() -> None:
    attributes = ["1", "1.0", "True", "0.0", "-0.0", "(1, 0.0)", "(True, 0.0)", "1", "(1, 0.0)"]
    nodes = "".join(f"  %{number}: i32[] = jax.pow(%x) {{y={y}}}\n" for number, y in enumerate(attributes))
    graph = parse(f"graph(%x: i32[]) {{\n{nodes}  return {', '.join(f'%{n}' for n in range(9))}\n}}")
    assert text(merge(graph)).endswith("return %0, %1, %2, %3, %4, %5, %6, %0, %5\n}")


def test_nodes_traced_in_another_context_are_not_shared() -> None:
    def twice(x: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(note="here"):
            first = jnp.sin(x)
        return [first, jnp.sin(x), jnp.sin(x)]

    traced = trace(twice, (1.5,), {})
    assert len(traced.graph.nodes) == 3
    assert len(merge(traced.graph).nodes) == 2
