"""Refusal of steps on all processes' devices that take values from queues and accumulators of one process.

Such a value differs between the processes, while their programs assume that it is the same on all. Values that differ
belong in the batch: each process gives its part.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflow.lowering.steps.program_watch import WatchedProgram
from dflow.tracing.errors import StrategyError
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.ir.types import AccumulatorType, QueueType


def refuse_own_resources(program: WatchedProgram) -> None:
    """Raise StrategyError for a program that takes a value from a queue, or uses an accumulator, of this process."""
    for node in _nodes(program.traced.graph):
        if not node.op.is_on_resource or not node.inputs:
            continue
        operand = node.inputs[0]
        if isinstance(operand.type, AccumulatorType):
            raise StrategyError(
                f"AllReduce: {program.name!r}: expected no accumulator, got {node.op.method} of one that each worker "
                "has for itself",
                "leave it out: AllReduce averages the gradients of all workers; accumulators of several are for Sync "
                "and Async",
                at=node.loc,
            )
        if isinstance(operand.type, QueueType) and node.array_outputs:
            raise StrategyError(
                f"AllReduce: {program.name!r}: expected values that are the same on all workers, got {node.op.method} "
                "of a queue that each worker has for itself",
                "take from the queue in the loop, as this worker's part of the batch:\n"
                "    strategy.run(step, (queue.dequeue() for _ in range(steps)), steps=steps)",
                at=node.loc,
            )


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from _nodes(body)
