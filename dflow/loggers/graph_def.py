"""A function's graph as the GraphDef that TensorBoard draws.

Name scopes are folders of names; `gradients/` has the backward part of each, and dflow's own scopes their names, such
as `apply_adam/`. `update/` has the other ops that run where the state is. A variable is a node, the first input of its
reads and updates. Devices are those of the graph. Control edges are the order of reads and writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflow.graphs.graph_drawing import orders, scopes_of, title_of
from dflow.tracing.devices.device import WITH_STATE
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType, RefType, TokenType, Type
from dflow.tracing.own_scopes import PREFIX
from dflow.tracing.syntax.text import node_text

_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\-/]")
#: Most characters of a node's text: TensorBoard leaves longer attributes out.
_MOST_TEXT = 1000
#: TensorFlow's names of dtypes, where they are not NumPy's in capitals.
_DTYPES = {"float16": "HALF", "float32": "FLOAT", "float64": "DOUBLE"}


def graph_def(graph: Graph) -> bytes:
    """Return the serialized GraphDef of a graph. A nested function, a branch and a loop are one node each.

    The attribute `text` of a node is its line in the graph's text, with literals and the user's line.
    """
    return _GraphDefWriter(graph).message


class _GraphDefWriter:
    def __init__(self, graph: Graph) -> None:
        from tensorboardX.proto.graph_pb2 import GraphDef
        from tensorboardX.proto.types_pb2 import DataType

        self._dtypes, self._fresh = DataType, FreshNames()
        #: By value, the input that stands for it: `node`, or `node:1` for a second result.
        self._inputs: dict[Value, str] = {}
        self._graph_def = GraphDef()
        self._graph_def.versions.producer = 22  # from this one on, shapes are in the attribute _output_shapes
        for value in graph.inputs:
            self._add_input(value)
        numbers = [self._add(node) for node in graph.nodes]
        for before, after in orders([[node] for node in graph.nodes]):
            self._control(numbers[before], numbers[after])
        for index, operand in enumerate(graph.outputs):
            self._add_node(f"return_{index}", "return", None, [operand], [operand.type])
        self.message: bytes = self._graph_def.SerializeToString()

    def _add_input(self, value: Value) -> None:
        op = type(value.type).__name__.removesuffix("Type").replace("Ref", "Variable").replace("Array", "Placeholder")
        number = self._add_node(value.name, op, value.device, [], [value.type], repr(value))
        self._inputs[value] = self._graph_def.node[number].name

    def _add(self, node: Node) -> int:
        results = [value.type for value in node.outputs if not isinstance(value.type, TokenType)]
        op = node.op.name.removeprefix("var.").removeprefix("jax.")
        number = self._add_node(_scoped(node), op, _device(node), node.inputs, results, node_text(node).strip(" !"))
        name = self._graph_def.node[number].name
        self._inputs.update((value, f"{name}:{index}" if index else name) for index, value in enumerate(node.outputs))
        return number

    def _add_node(
        self, name: str, op: str, device: str | None, inputs: Sequence[Operand], results: Sequence[Type], text: str = ""
    ) -> int:
        taken = [self._inputs[operand] for operand in inputs if isinstance(operand, Value)]
        node = self._graph_def.node.add(name=self._fresh(_legal(name)), op=op, device=device or "", input=taken)
        if text:
            node.attr["text"].s = text[:_MOST_TEXT].encode()
        for result in results:
            array = result.of if isinstance(result, RefType) else result
            shape = node.attr["_output_shapes"].list.shape.add(unknown_rank=not isinstance(array, ArrayType))
            if isinstance(array, ArrayType):
                for size in array.shape:
                    shape.dim.add(size=size)
                dtype = f"DT_{_DTYPES.get(str(array.dtype), str(array.dtype).upper())}"
                if dtype in self._dtypes.keys():  # noqa: SIM118 (an enumeration of protobuf)
                    node.attr["dtype"].type = self._dtypes.Value(dtype)
        return len(self._graph_def.node) - 1

    def _control(self, before: int, after: int) -> None:
        name, node = self._graph_def.node[before].name, self._graph_def.node[after]
        if name not in (taken.split(":")[0] for taken in node.input):  # that value gives the order already
            node.input.append(f"^{name}")


def _scoped(node: Node) -> str:
    """Return the name that a node gets, if it is free. A read outside of scopes is `<variable>/read`."""
    scopes = [name.removeprefix(PREFIX) for name in scopes_of(node)]
    if "transpose(" in node.scope:
        scopes.insert(0, "gradients")
    elif node.device == WITH_STATE and not scopes:
        scopes.insert(0, "update")
    elif node.op is ops.var_read and not scopes:
        scopes.insert(0, node.values[0].name)
    return "/".join([*scopes, title_of(node).split(" ")[-1].removeprefix("var.")])


def _device(node: Node) -> str | None:
    """Return the task or device where a node runs; that of the variable that it reads or updates."""
    if node.device not in (None, WITH_STATE):
        return node.device
    return next((value.device for value in node.values if value.is_variable), None)


def _legal(name: str) -> str:
    """Return a name that TensorBoard takes: letters, digits and `_.-/`, with a letter, a digit or a dot first."""
    legal = _ILLEGAL.sub("_", name).strip("/")
    return legal if legal[:1].isalnum() else f".{legal}"
