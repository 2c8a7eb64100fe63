"""The picture of a graph: its boxes, their positions, and the SVG."""

from __future__ import annotations

import itertools
import re
from typing import Any
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

import dflow
from dflow.graphs.graph_drawing import MOST_BOXES, Box, Drawing, drawing_of
from dflow.graphs.graph_layout import COLUMN_GAP, WIDEST, laid_out, layers_of
from dflow.graphs.graph_svg import svg
from tests.graphs_ import graphs


def titles(drawing: Drawing) -> list[str]:
    return [box.title for box in drawing.boxes]


def box(drawing: Drawing, title: str) -> Box:
    return next(box for box in drawing.boxes if box.title == title)


def joined(drawing: Drawing) -> set[tuple[str, str, str | None]]:
    return {(drawing.boxes[a].title, drawing.boxes[b].title, value) for a, b, value in drawing.edges}


# Boxes.


def test_a_scope_is_one_box_and_its_gradient_another() -> None:
    w = dflow.Variable(jnp.ones((3, 3)), name="w")

    def step(x: Any) -> Any:
        def loss() -> Any:
            with jax.named_scope("dense"), jax.named_scope("inner"):
                hidden = jnp.tanh(x @ w)
            return hidden.sum()

        return dflow.value_and_grad(loss, [w])()

    drawing = drawing_of(dflow.graph(step, jnp.ones((2, 3))).graph)
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
