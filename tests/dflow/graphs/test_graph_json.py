"""The JSON of a graph: its tree of groups, its edges, and its limits."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import dflow
from dflow.graphs import graph_json as module
from dflow.graphs.graph_json import MOST_CHILDREN, graph_json
from dflow.testing import memory_cluster
from dflow.tracing.devices.device import with_state
from tests.effort import examples
from tests.graphs_ import graphs


def data_of(fn: Any, *args: Any) -> dict[str, Any]:
    return graph_json(dflow.graph(fn, *args).graph, "step")


def node(data: dict[str, Any], title: str) -> int:
    [found] = [index for index, one in enumerate(data["nodes"]) if one["title"] == title]
    return found


def path(data: dict[str, Any], index: int) -> list[str]:
    """Titles of the groups around a node, outermost first."""
    within = data["nodes"][index].get("within")
    return [] if within is None else [*path(data, within), data["nodes"][within]["title"]]


def joined(data: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (data["nodes"][a]["title"], data["nodes"][b]["title"]) for a, b, value in data["edges"] if value is not None
    }


def test_scopes_are_groups_within_groups_and_those_of_the_gradient_are_apart() -> None:
    w = dflow.Variable(jnp.ones((3, 3)), name="w")

    def step(x: Any) -> Any:
        def loss() -> Any:
            with jax.named_scope("dense"), jax.named_scope("inner"):
                hidden = jnp.tanh(x @ w)
            return hidden.sum()

        return dflow.value_and_grad(loss, [w])()

    data = data_of(step, jnp.ones((2, 3)))
    assert path(data, node(data, "tanh")) == ["dense", "inner"]
    assert {"dense", "dense, backward"} <= {one["title"] for one in data["nodes"] if one["kind"] == "scope"}
    tanh = data["nodes"][node(data, "tanh")]
    line = data["lines"][tanh["line"]]
    assert line["text"] == "hidden = jnp.tanh(x @ w)"
    assert line["short"].startswith("test_graph_json.py:")
    assert line["at"].endswith(line["short"])
    [value] = [data["values"][index] for index in tanh["gives"]]
    assert (value["type"], value["size_bytes"]) == ("f32[2,3]", 24)


def test_effects_name_their_variables_and_keep_their_order() -> None:
    w = dflow.Variable(jnp.ones(3), name="w")

    def step(x: Any) -> Any:
        y = jnp.sin(w.read()) + x
        w.assign_add(y)
        return jnp.cos(w.read())

    data = data_of(step, jnp.ones(3))
    assert data["variables"] == [{"name": "w", "kind": "variable", "type": "f32[3]", "size_bytes": 12}]
    write = node(data, "var.assign_add")
    assert data["nodes"][write]["writes"] == [0]
    assert data["nodes"][write]["acts"] is True
    reads = [index for index, one in enumerate(data["nodes"]) if one["title"] == "var.read"]
    assert [data["nodes"][index]["reads"] for index in reads] == [[0], [0]]
    assert [reads[0], write, None] in data["edges"]
    assert [write, reads[1], None] in data["edges"]


def test_a_nested_function_has_its_ops_in_it_joined_to_those_outside() -> None:
    inner = jax.jit(lambda x, y: jnp.tanh(x) + jnp.sin(y))
    data = data_of(lambda a: jnp.sqrt(inner(jnp.exp(a), 2.0)), 1.0)
    assert data["nodes"][node(data, "jit <lambda>")]["kind"] == "function"
    assert path(data, node(data, "tanh")) == ["jit <lambda>"]
    assert {("exp", "tanh"), ("tanh", "add"), ("sin", "add"), ("add", "sqrt"), ("sqrt", "return 0")} <= joined(data)


def test_the_body_of_a_loop_gives_its_results_and_the_test_does_not() -> None:
    def loop(x: Any, limit: Any) -> Any:
        ended, _ = jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] * c[1], c[1]), (jnp.exp(x), jnp.cos(x)))
        return jnp.sqrt(ended)

    found = joined(data_of(loop, 1.0, 9.0))
    assert {("%limit", "lt"), ("exp", "lt"), ("exp", "mul"), ("cos", "mul"), ("mul", "sqrt")} <= found
    assert ("lt", "sqrt") not in found


def test_both_arms_of_a_branch_give_its_result() -> None:
    data = data_of(lambda p, x: jnp.sqrt(jax.lax.cond(p, jnp.sin, jnp.cos, x)), True, 1.0)
    assert {("%x", "sin"), ("%x", "cos"), ("sin", "sqrt"), ("cos", "sqrt")} <= joined(data)


def test_an_update_is_on_the_device_of_the_variable_that_it_feeds() -> None:
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones(1000), name="w")
            b = dflow.Variable(lambda: jnp.ones(()), name="b")

        def step(x: Any) -> None:
            with with_state():
                w.assign_sub(jnp.sin(x))
                b.assign_sub(jnp.cos(x).sum())

        data = data_of(step, jnp.ones(1000))
        cluster.close()
    assert {one["name"]: one["device"] for one in data["variables"]} == {"w": "ps:0", "b": "ps:1"}
    assert [data["nodes"][node(data, title)]["device"] for title in ("sin", "cos")] == ["ps:0", "ps:1"]
    updates = {data["variables"][one["writes"][0]]["name"]: one["device"] for one in data["nodes"] if one.get("writes")}
    assert updates == {"w": "ps:0", "b": "ps:1"}


def test_no_group_has_more_children_than_a_page_lays_out() -> None:
    def long(x: Any) -> Any:
        for _ in range(2000):
            x = jnp.sin(x)
        return x

    data = data_of(long, 1.0)
    children = Counter(one.get("within") for one in data["nodes"])
    assert max(children.values()) <= MOST_CHILDREN
    assert data["ops"] == 2000
    assert sum(one["kind"] == "op" for one in data["nodes"]) == 2000


def test_a_graph_that_is_too_large_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPS", 4)
    inner = jax.jit(lambda x: jnp.tanh(jnp.sin(x)) * 2)

    def step(x: Any) -> Any:
        for _ in range(2):
            x = inner(x)
        return jnp.exp(x)

    data = data_of(step, 1.0)
    assert data["notes"] == ["2 calls are shown without their bodies, since the graph is large"]
    monkeypatch.setattr(module, "MOST_OPS", 2)
    assert data_of(step, 1.0)["notes"][0] == "the first 2 of 3 ops; print the graph to see all"


@settings(max_examples=examples(30))
@given(graphs())
def test_every_graph_is_json_whose_indices_exist(graph: Any) -> None:
    data = json.loads(json.dumps(graph_json(graph), allow_nan=False))
    nodes, values = len(data["nodes"]), len(data["values"])
    for source, target, value in data["edges"]:
        assert 0 <= source < nodes
        assert 0 <= target < nodes
        assert source != target
        assert value is None or 0 <= value < values
    for index, one in enumerate(data["nodes"]):
        assert len(path(data, index)) < 20
        assert all(0 <= place < len(data["variables"]) for place in [*one.get("reads", []), *one.get("writes", [])])
    assert data["ops"] >= len(graph.nodes)


def test_the_parts_of_dflow_itself_are_folded_groups_with_the_name_of_their_table() -> None:
    users = dflow.Embedding(64, 2, vocabulary=dflow.Vocabulary(), name="users")
    items = dflow.Embedding(50, 2, name="shop/items")
    w = dflow.Variable(jnp.ones((4, 1)), name="w")
    adam = dflow.Optimizer(optax.adam(0.1), [users, items, w], name="adam")

    def step(ids: Any, bought: Any) -> Any:
        found = users.find(ids)

        def loss() -> Any:
            with jax.named_scope("tower"):
                return (jnp.concatenate([users(found), items.bag(bought)], 1) @ w).mean()

        value, gradients = dflow.value_and_grad(loss, [users, items, w])()
        adam.apply(gradients, found=found)
        return value

    data = data_of(step, dflow.wide_ids(np.arange(8)), np.zeros((8, 2), np.int32))
    nodes = data["nodes"]
    assert data["ops"] > 500
    roots = [one for one in nodes if "within" not in one]
    assert len(roots) < 30
    folded = {"/".join([*path(data, index), one["title"]]) for index, one in enumerate(nodes) if one.get("folded")}
    assert {
        "find users",
        "find users/route users",
        "tower/lookup users",
        "tower/bag shop.items",
        "tower/bag shop.items/lookup shop.items",
        "tower, backward/lookup users",
        "apply adam",
        "apply adam/admit to users.0",
    } <= folded
    assert not any(title.partition("/")[0] in ("tower", "tower, backward") for title in folded if "/" not in title)
    # Ops of JAX's functions that were inlined, such as `%`, are with the others.
    strays = {one["title"] for one in roots if one["kind"] in ("op", "line", "run")}
    assert not {"rem", "ne"} & strays
