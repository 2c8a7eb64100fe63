"""Exports of programs for other tasks, and their keys: programs that compute the same are exported once.

Why: variables are spread over ps tasks, so the tasks' programs differ most often in nothing but names, and to trace and
lower a program of 3,000 ops takes a quarter of a second. Invariant: two programs share an export only if they apply the
same ops, under the same trace contexts, to arguments of the same types; when in doubt they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import numpy as np

from dflow.lowering.programs.discharge import Discharged
from dflow.lowering.programs.program import export_program
from dflow.tracing.ir.exact_attributes import exact_attributes
from dflow.tracing.ir.graph import Node, Operand, Value


def shared_exports() -> Callable[[Discharged], bytes]:
    """Return a function that exports programs, for `load_program`: equal ones among its arguments once."""
    # An entry keeps its program alive, because parts of the key are identities of the objects that it holds.
    made: dict[Hashable, tuple[Discharged, bytes]] = {}

    def blob(program: Discharged) -> bytes:
        key = computation(program)
        if key is None:
            return export_program(program.fn, program.types)
        if key not in made:
            made[key] = program, export_program(program.fn, program.types)
        return made[key][1]

    return blob


def computation(program: Discharged) -> Hashable | None:
    """Return a key that equals that of a program with the same ops and types; None if it cannot be compared."""
    arguments = (*program.written, *program.read, *program.operands)
    numbers: dict[Value, int] = {value: number for number, value in enumerate(arguments)}
    nodes = []
    for node in program.graph.nodes:
        if node.bodies:
            return None
        nodes.append(_applied(node, numbers))
        for value in node.outputs:
            numbers[value] = len(numbers)
    outputs = tuple(_operand(output, numbers) for output in program.graph.outputs)
    types = tuple((value.type, type.sharding) for value, type in zip(arguments, program.types, strict=True))
    key = types, tuple(nodes), outputs
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _applied(node: Node, numbers: Mapping[Value, int]) -> Hashable:
    attributes, context = exact_attributes(node.attributes), id(getattr(node.origin, "context", None))
    return node.op, tuple(_operand(operand, numbers) for operand in node.inputs), attributes, context, len(node.outputs)


def _operand(operand: Operand, numbers: Mapping[Value, int]) -> Hashable:
    if isinstance(operand, Value):
        return numbers[operand]
    return np.asarray(operand.value).tobytes(), str(np.asarray(operand.value).dtype), operand.type
