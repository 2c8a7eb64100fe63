"""Name scopes of dflow's own ops: they are in the graph, and do not change the programs that tasks get."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import dflow
from dflow.lowering.programs.discharge import discharge
from dflow.lowering.programs.shared_exports import shared_exports
from dflow.tracing.own_scopes import own_scope


def test_names_are_one_part_of_a_path_and_short() -> None:
    def fn(x: Any) -> Any:
        with own_scope("lookup", "shop/items (new)"), own_scope("route", "n" * 90):
            return x + 1

    [node] = [node for node in dflow.graph(fn, jnp.ones(2)).graph.nodes if node.op.name == "jax.add"]
    assert node.scope == f"dflow:lookup shop.items .new./dflow:route {'n' * 37}..."


def test_ops_of_an_inlined_function_are_in_the_scopes_of_its_call() -> None:
    w = dflow.Variable(jnp.ones(2), name="w")

    @jax.jit
    def inner(x: Any) -> Any:
        with jax.named_scope("inner"):
            return x * w.read()

    def fn(x: Any) -> Any:
        with jax.named_scope("outer"):
            return inner(x)

    [node] = [node for node in dflow.graph(fn, jnp.ones(2)).graph.nodes if node.op.name == "jax.mul"]
    assert node.scope == "outer/inner"


def test_programs_of_tables_with_other_names_are_the_same_bytes() -> None:
    def exported(name: str) -> bytes:
        def fn(x: Any) -> Any:
            with own_scope("lookup", name):
                return jnp.sin(x) * 2

        graph = dflow.graph(fn, jnp.ones(2)).graph
        assert {node.scope for node in graph.nodes} == {f"dflow:lookup {name}"}
        return shared_exports()(discharge(graph))

    assert exported("one") == exported("another")
