"""Runs of passes: in order, shown to an observer, verified on request; a pass that breaks the graph is named."""

from __future__ import annotations

import dataclasses

import pytest

from dflow.lowering.passes.base import Pass, run_passes
from dflow.lowering.pipeline import SIMPLIFY
from dflow.tracing.errors import VerifyError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.syntax.text import parse

GRAPH = parse("""
graph(%x: f32[]) {
  %1: f32[] = jax.neg(%x)  # train.py:7
  %2: f32[] = jax.neg(%x)
  %3: f32[] = jax.mul(%1, %2)  # train.py:9
  return %1, %3
}""")


#: A pass with a fault: uses come before what they use.
BACKWARDS = Pass("backwards", lambda graph: dataclasses.replace(graph, nodes=graph.nodes[::-1]))


def test_an_observer_sees_what_was_traced_and_what_each_pass_made() -> None:
    seen: list[tuple[str, Graph]] = []
    made = run_passes(GRAPH, SIMPLIFY, observe=lambda name, graph: seen.append((name, graph)))
    assert [name for name, _ in seen] == ["traced", "prune", "merge"]
    assert seen[0][1] is GRAPH
    assert seen[-1][1] is made
    assert len(made.nodes) == 2


def test_a_pass_that_breaks_the_graph_is_blamed_by_name() -> None:
    seen: list[str] = []
    passes = [SIMPLIFY[0], BACKWARDS, SIMPLIFY[1]]
    with pytest.raises(VerifyError, match=r"%3: %1 is used before it is defined\n  at train.py:9") as caught:
        run_passes(GRAPH, passes, check=True, observe=lambda name, _: seen.append(name))
    assert caught.value.__notes__ == ["after the pass 'backwards'; the graph was valid before it"]
    # The observer saw the broken graph, so a dump contains it.
    assert seen == ["traced", "prune", "backwards"]


def test_no_pass_is_blamed_for_a_graph_that_was_broken_before() -> None:
    with pytest.raises(VerifyError, match="used before it is defined") as caught:
        run_passes(BACKWARDS.made_of(GRAPH), SIMPLIFY, check=True)
    assert not hasattr(caught.value, "__notes__")
