from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from dflow.lowering.passes.merge import Merge
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.syntax.text import parse, text


def test_nodes_whose_attributes_cannot_be_compared_are_never_shared() -> None:
    graph = parse("""
graph(%x: i32[2,2]) {
  %1: i32[2,2] = jax.transpose(%x) {permutation=[1, 0]}
  %2: i32[2,2] = jax.transpose(%x) {permutation=[1, 0]}
  return %1, %2
}""")
    assert text(Merge()(graph)) == text(graph)


def test_numbers_of_another_type_make_another_attribute() -> None:
    graph = parse("""
graph(%x: i32[]) {
  %1: i32[] = jax.pow(%x) {y=1}
  %2: i32[] = jax.pow(%x) {y=1.0}
  %3: i32[] = jax.pow(%x) {y=True}
  %4: i32[] = jax.pow(%x) {y=1}
  return %1, %2, %3, %4
}""")
    assert text(Merge()(graph)).endswith("return %1, %2, %3, %1\n}")


def test_attributes_that_compare_equal_and_have_other_bits_are_told_apart() -> None:
    graph = parse("""
graph(%x: i32[]) {
  %1: i32[] = jax.pow(%x) {y=0.0}
  %2: i32[] = jax.pow(%x) {y=-0.0}
  %3: i32[] = jax.pow(%x) {y=(1, 0.0)}
  %4: i32[] = jax.pow(%x) {y=(True, 0.0)}
  %5: i32[] = jax.pow(%x) {y=(1, 0.0)}
  return %1, %2, %3, %4, %5
}""")
    assert text(Merge()(graph)).endswith("return %1, %2, %3, %4, %3\n}")


def test_nodes_traced_in_another_context_are_not_shared() -> None:
    def twice(x: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(note="here"):
            first = jnp.sin(x)
        return [first, jnp.sin(x), jnp.sin(x)]

    traced = trace(twice, (1.5,), {})
    assert len(traced.graph.nodes) == 3
    assert len(Merge()(traced.graph).nodes) == 2
