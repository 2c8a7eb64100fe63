"""Pictures of a graph: its boxes, edges and groups, as SVG and as JSON."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.graphs import graph_json as module
from dflow.graphs.graph_drawing import MOST_BOXES, Box, Drawing, drawing_of
from dflow.graphs.graph_json import MOST_CHILDREN, graph_json
from dflow.graphs.graph_layout import COLUMN_GAP, WIDEST, laid_out, layers_of
from dflow.graphs.graph_svg import svg
from dflow.testing import memory_cluster
from dflow.tracing.devices.device import with_state
from tests.effort import examples
from tests.graphs_ import graphs


def titles(drawing: Drawing) -> list[str]:
    return [box.title for box in drawing.boxes]


def box(drawing: Drawing, title: str) -> Box:
    return next(box for box in drawing.boxes if box.title == title)


def joined(drawing: Drawing) -> set[tuple[str, str, str | None]]:
    return {(drawing.boxes[a].title, drawing.boxes[b].title, value) for a, b, value in drawing.edges}


def step_of_scopes() -> Callable[[Any], Any]:
    """Return a step with a gradient, whose op is in a scope within a scope."""
    w = dflow.Variable(jnp.ones((3, 3)), name="w")

    def step(x: Any) -> Any:
        def loss() -> Any:
            with jax.named_scope("dense"), jax.named_scope("inner"):
                hidden = jnp.tanh(x @ w)
            return hidden.sum()

        return dflow.value_and_grad(loss, [w])()

    return step


# Boxes.


def test_a_scope_is_one_box_and_its_gradient_another() -> None:
    drawing = drawing_of(dflow.graph(step_of_scopes(), jnp.ones((2, 3))).graph)
    assert {"dense", "dense, backward"} <= {*titles(drawing)}
    dense = box(drawing, "dense")
    assert (dense.kind, dense.takes) == ("group", ("%w",))
    assert any("jax.tanh" in line and "test_graph_drawing.py:" in line for line in dense.told)
    assert dense.detail == f"{len(dense.told)} ops"


def test_variables_are_named_in_the_boxes_that_use_them_and_effects_keep_their_order() -> None:
    w = dflow.Variable(jnp.ones(3), name="w")

    def step(x: Any) -> Any:
        y = jnp.sin(w.read()) + x
        w.assign_add(y)
        return jnp.cos(w.read())

    drawing = drawing_of(dflow.graph(step, jnp.ones(3)).graph)
    assert drawing.aside == ("%w: ref<f32[3]>",)
    assert box(drawing, "sin").takes == ("%w",)
    write, read = box(drawing, "var.assign_add"), box(drawing, "var.read")
    assert (write.has_effects, read.has_effects, write.takes) == (True, False, ("%w",))
    assert ("var.assign_add", "var.read", None) in joined(drawing)
    assert ("var.read", "cos", "%w_2") in joined(drawing)
    assert ("%x", "add", "%x") in joined(drawing)


def test_a_value_that_many_take_is_set_aside() -> None:
    def many(x: Any) -> Any:
        rate = dflow.name(x + 1, "rate")
        return [fn(rate) for fn in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.sqrt, jnp.log, jnp.abs)]

    drawing = drawing_of(dflow.graph(many, 1.0).graph)
    assert [line.split(":")[0] for line in drawing.aside] == ["%rate"]
    assert box(drawing, "tanh").takes == ("%rate",)
    assert not any(value == "%rate" for _, _, value in drawing.edges)


def test_a_nested_function_and_a_loop_are_one_box_each_and_devices_are_known() -> None:
    def step(x: Any) -> Any:
        with dflow.device("/job:ps/task:0"):
            y = jnp.sin(x)
        looped = jax.lax.scan(lambda c, r: (c * r, c), y, x)[0]
        return jax.jit(lambda z: jnp.cos(z) + 1)(looped)

    drawing = drawing_of(dflow.graph(step, jnp.ones(3).sum(keepdims=True)[:, None][0]).graph)
    assert [box(drawing, title).kind for title in ("scan", "jit <lambda>", "sin")] == ["group", "group", "op"]
    assert box(drawing, "sin").device == "ps:0"


def test_what_is_too_large_is_drawn_by_line_and_says_so() -> None:
    def long(x: Any) -> Any:
        for _ in range(MOST_BOXES):
            x = jnp.sin(x)
        return x

    drawing = drawing_of(dflow.graph(long, 1.0).graph)
    assert len(drawing.boxes) == 3
    assert drawing.note == f"{MOST_BOXES} ops: those of one line that follow each other are one box"
    assert drawing.note in svg(drawing)


def test_what_is_far_too_large_is_cut_off_and_says_so() -> None:
    def zigzag(x: Any) -> Any:
        for _ in range(MOST_BOXES // 2 + 1):
            x = jnp.sin(x)
            x = jnp.cos(x)
        return x

    drawing = drawing_of(dflow.graph(zigzag, 1.0).graph)
    assert drawing.note == f"the first 1000 of 1002 boxes, for {MOST_BOXES + 2} ops; print the graph to see all"
    assert titles(drawing)[-1] == "return 0"
    assert len(drawing.boxes) == 1000 + 2


@given(graphs())
def test_every_graph_has_a_picture_whose_edges_go_forward(graph: Any) -> None:
    drawing = drawing_of(graph)
    assert all(source < target for source, target, _ in drawing.edges)
    ET.fromstring(svg(drawing))


# Positions.

_edges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda edge: edge[0] < edge[1]), max_size=80)


@given(_edges)
def test_edges_go_down_and_no_layer_is_too_wide(edges: list[tuple[int, int]]) -> None:
    layers = layers_of(31, edges)
    assert all(layers[source] < layers[target] for source, target in edges)
    assert max(layers.count(layer) for layer in layers) <= WIDEST
    assert min(layers) >= 0


@given(_edges, st.lists(st.floats(10, 200), min_size=31, max_size=31))
def test_boxes_do_not_touch_and_edges_end_at_them(edges: list[tuple[int, int]], widths: list[float]) -> None:
    sizes = [(width, 40.0) for width in widths]
    layout = laid_out(sizes, edges)
    by_layer: dict[float, list[int]] = {}
    for number, (_, y) in enumerate(layout.centers):
        by_layer.setdefault(y, []).append(number)
    for row in by_layer.values():
        ordered = sorted(row, key=lambda number: layout.centers[number][0])
        for left, right in itertools.pairwise(ordered):
            gap = layout.centers[right][0] - layout.centers[left][0] - (widths[left] + widths[right]) / 2
            assert gap >= COLUMN_GAP - 1e-6
    for path, (source, target) in zip(layout.paths, edges, strict=True):
        assert path[0] == (layout.centers[source][0], layout.centers[source][1] + 20)
        assert path[-1] == (layout.centers[target][0], layout.centers[target][1] - 20)
        assert [y for _, y in path] == sorted(y for _, y in path)
    assert all(x - width / 2 >= -1e-6 for (x, _), width in zip(layout.centers, widths, strict=True))
    assert max(x + width / 2 for (x, _), width in zip(layout.centers, widths, strict=True)) <= layout.width + 1e-6


def test_a_box_stands_beside_what_needs_it_not_at_the_top() -> None:
    chain = [(number, number + 1) for number in range(5)]
    layers = layers_of(8, [*chain, (5, 7), (6, 7)])
    assert layers[6] == layers[7] - 1 == 5


# The SVG.


def test_the_picture_says_names_types_devices_and_effects() -> None:
    w = dflow.Variable(jnp.ones(3), name="a<b")

    def step(x: Any) -> Any:
        with dflow.device("/job:ps/task:0"):
            w.assign_add(x)
        return dflow.name(x * 2, "hidden")

    view = dflow.graph(step, jnp.ones(3))
    picture = view._repr_svg_()
    root = ET.fromstring(picture)
    said = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for line in ("! var.assign_add", "%hidden: f32[3]", "%a_b: ref<f32[3]>", "ps:0", "return 0"):
        assert line in said
    fills = {rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert len(fills) >= 4
    assert picture == dflow.graph(step, jnp.ones(3)).svg()
    assert re.search(r"<pre>graph\(%a_b: ref&lt;f32\[3\]&gt;", view._repr_html_())


def test_an_edge_across_the_whole_picture_becomes_a_name() -> None:
    def deep(x: Any) -> Any:
        first = dflow.name(jnp.sin(x), "first")
        y = first
        for _ in range(20):
            y = jnp.cos(y)
        return y * first

    picture = dflow.graph(deep, jnp.ones(3)).svg()
    assert '<text class="takes"' in picture
    assert picture.count("<title>%first</title>") == 1


def data_of(fn: Any, *args: Any) -> dict[str, Any]:
    return graph_json(dflow.graph(fn, *args).graph, "step")


def node(data: dict[str, Any], title: str) -> int:
    [found] = [index for index, one in enumerate(data["nodes"]) if one["title"] == title]
    return found


def path(data: dict[str, Any], index: int) -> list[str]:
    """Titles of the groups around a node, outermost first."""
    within = data["nodes"][index].get("within")
    return [] if within is None else [*path(data, within), data["nodes"][within]["title"]]


def joined_groups(data: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (data["nodes"][a]["title"], data["nodes"][b]["title"]) for a, b, value in data["edges"] if value is not None
    }


def test_scopes_are_groups_within_groups_and_those_of_the_gradient_are_apart() -> None:
    data = data_of(step_of_scopes(), jnp.ones((2, 3)))
    assert path(data, node(data, "tanh")) == ["dense", "inner"]
    assert {"dense", "dense, backward"} <= {one["title"] for one in data["nodes"] if one["kind"] == "scope"}
    tanh = data["nodes"][node(data, "tanh")]
    line = data["lines"][tanh["line"]]
    assert line["text"] == "hidden = jnp.tanh(x @ w)"
    assert line["short"].startswith("test_graph_drawing.py:")
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
    assert {("exp", "tanh"), ("tanh", "add"), ("sin", "add"), ("add", "sqrt"), ("sqrt", "return 0")} <= joined_groups(
        data
    )


def test_the_body_of_a_loop_gives_its_results_and_the_test_does_not() -> None:
    def loop(x: Any, limit: Any) -> Any:
        ended, _ = jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] * c[1], c[1]), (jnp.exp(x), jnp.cos(x)))
        return jnp.sqrt(ended)

    found = joined_groups(data_of(loop, 1.0, 9.0))
    assert {("%limit", "lt"), ("exp", "lt"), ("exp", "mul"), ("cos", "mul"), ("mul", "sqrt")} <= found
    assert ("lt", "sqrt") not in found


def test_both_arms_of_a_branch_give_its_result() -> None:
    data = data_of(lambda p, x: jnp.sqrt(jax.lax.cond(p, jnp.sin, jnp.cos, x)), True, 1.0)
    assert {("%x", "sin"), ("%x", "cos"), ("sin", "sqrt"), ("cos", "sqrt")} <= joined_groups(data)


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
