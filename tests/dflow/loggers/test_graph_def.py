"""The graph of a step as TensorBoard's graph plugin gives it: names, devices, shapes, state and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dflow
from dflow.loggers import TensorBoard
from tests.dflow.loggers.test_tensorboard import plugin_context

pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")

pytestmark = pytest.mark.filterwarnings(
    "ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning",
    "ignore:html5lib's sanitizer is deprecated:DeprecationWarning",
)


def shown(folder: Path, graph: dflow.GraphView) -> dict[str, Any]:
    """The nodes by name that the plugin gives of a graph."""
    from google.protobuf import text_format
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.context import RequestContext
    from tensorboard.plugins.graph.graphs_plugin import GraphsPlugin

    with TensorBoard(folder / "run") as board:
        board.graph(graph)
    plugin = GraphsPlugin(plugin_context(folder))
    limits = {"limit_attr_size": 1024, "large_attrs_key": "_too_large_attrs"}
    body, _ = plugin.graph_impl(RequestContext(), "run", None, False, experiment="", **limits)
    found = text_format.Parse(body, GraphDef())
    assert len({node.name for node in found.node}) == len(found.node)
    names = {node.name for node in found.node}
    assert all(taken.removeprefix("^").split(":")[0] in names for node in found.node for taken in node.input)
    assert not any("_too_large_attrs" in node.attr for node in found.node)
    return {node.name: node for node in found.node}


def test_name_scopes_variables_updates_and_order(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.ones((3, 2)), name="dense/w")
    sgd = dflow.Optimizer(optax.sgd(0.1), [w], name="sgd")

    @dflow.jit
    def step(x: Any) -> Any:
        def loss() -> Any:
            with jax.named_scope("dense"):
                return jnp.sum(jnp.tanh(x @ w))

        value, gradients = dflow.value_and_grad(loss, [w])()
        sgd.apply(gradients)
        return value

    nodes = shown(tmp_path, dflow.graph(step, jnp.ones((4, 3))))
    variable = nodes["dense/w"]
    assert variable.op == "Variable"
    assert [dim.size for dim in variable.attr["_output_shapes"].list.shape[0].dim] == [3, 2]
    assert nodes["x"].op == "Placeholder"
    assert nodes["dense/w/read"].input == ["dense/w"]
    product = nodes["dense/dot_general"]
    assert product.input == ["x", "dense/w/read"]
    assert b"test_graph_def.py:" in product.attr["text"].s
    assert nodes["gradients/dense/dot_general"].input[0].startswith("gradients/")
    update = nodes["apply_sgd/assign_add"]
    assert (update.op, update.input[0]) == ("assign_add", "dense/w")
    assert "^dense/w/read" in update.input  # the write comes after the read, which its value does not say
    assert nodes["return_0"].input == ["dense/reduce_sum"]


def test_a_node_of_several_results_a_nested_function_and_odd_names(tmp_path: Path) -> None:
    queue = dflow.FIFOQueue(2, jnp.zeros(()), name="queue")

    def step(x: Any) -> Any:
        carried, each = jax.lax.scan(lambda carry, y: (carry + y, carry), 0.0, x)
        with jax.named_scope("a b/_c"):
            queue.enqueue(carried)
            each = jax.nn.relu(each + 1.0)
        return each, x > 0

    nodes = shown(tmp_path, dflow.graph(step, jnp.ones(3)))
    assert nodes["queue"].op == "Queue"
    assert nodes["a_b/_c/add"].input == ["scan:1"]
    assert nodes["a_b/_c/queue.enqueue"].input == ["queue", "scan"]
    assert nodes["scan"].op == "scan"
    assert [len(shape.dim) for shape in nodes["scan"].attr["_output_shapes"].list.shape] == [0, 1]
    assert nodes["gt"].attr["dtype"].type == 10  # DT_BOOL


def test_devices_on_a_cluster(tmp_path: Path) -> None:
    from dflow.testing import memory_cluster

    with memory_cluster(ps=1) as memory:
        worker = memory.worker()
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.zeros(2), name="w")
        nodes = shown(tmp_path, dflow.graph(lambda x: w.assign_add(w * x), jnp.ones(2)))
        worker.close()
    assert {name: node.device for name, node in nodes.items()} == {
        "w": "/job:ps/task:0",
        "x": "",
        "w/read": "/job:ps/task:0",
        "mul": "",
        "assign_add": "/job:ps/task:0",
    }
