"""Measure the cost of the passes per node: does it stay the same from graphs of 10,000 nodes to 100,000?

There are four kinds of graph: updates of many variables in one task; the same with half of the variables on another
task, or on another device of the task, so that values cross; and numbers with a queue op after every tenth, which are
partitioned into as many XLA calls. Each is traced again at each size. Copies between devices of any size are delayed.
*graph* is the time from the jaxpr to the graph, *plans* the time after the passes; verifying and printing run only on
request.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish
from dflow.lowering.passes.base import Pass, run_passes
from dflow.lowering.passes.schedule import schedule
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.steps.lowered import make_plans
from dflow.tracing.devices.device_name import device_name, split_device_name
from dflow.tracing.ir.graph import Graph
from dflow.tracing.jax_frontend import make_jaxpr
from dflow.tracing.jaxprs.from_jaxpr import graph_of
from dflow.tracing.syntax.text import text
from dflow.tracing.syntax.verify import verify

SIZES = (1_000, 10_000, 100_000)
ELSEWHERE = "/job:ps/task:0"
DEVICES = device_name(ALONE, "cpu:0"), device_name(ALONE, "cpu:1")
#: Ops per update of a variable, and between two queue ops, so that a graph has the requested size.
PER_VARIABLE, PER_QUEUE_OP = 20, 10
ROW = jax.ShapeDtypeStruct((4,), jnp.float32)


def main() -> None:
    given = options(__doc__, rounds=3, largest=SIZES[-1])
    sizes = [size for size in SIZES if size <= given.largest]
    rows = []
    gc.freeze()  # else the collection before each stage walks all objects that JAX and optax have imported
    for name, make, places in (
        ("updates", updates, (ALONE,)),
        ("two tasks", updates, (ALONE, ELSEWHERE)),
        ("two devices", updates, DEVICES),
        ("queue ops", queue_ops, (ALONE,)),
    ):
        fns = {size: make(size) for size in sizes}
        found = in_turn({str(size): partial(measured, fn, places) for size, fn in fns.items()}, given.rounds)
        rows += [row(name, stage, found) for stage in found[str(sizes[0])][0]]
    publish("passes", rows, as_json=given.json)


def row(name: str, stage: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    times = {size: [each[stage] for each in by_round] for size, by_round in found.items()}
    per_node = {f"{int(size):,}": round(1e6 * median(seconds), 2) for size, seconds in times.items()}
    *_, before, last = times.values()
    return {"graph": name, "ms per 1,000 nodes": stage, **per_node, "last / before": median_ratio(last, before)[0]}


def updates(size: int) -> Callable[[jax.Array], Any]:
    variables = [dflow.Variable(jnp.zeros(4)) for _ in range(size // PER_VARIABLE)]

    def fn(x: jax.Array) -> jax.Array:
        for variable in variables:
            y = variable.read() * x
            for _ in range(PER_VARIABLE - 4):
                y = jnp.sin(y)
            variable.assign_add(y)
            x = x + y
        return x

    return fn


def queue_ops(size: int) -> Callable[[jax.Array], Any]:
    queue = dflow.FIFOQueue(4, ROW)

    def fn(x: jax.Array) -> jax.Array:
        for number in range(size // PER_QUEUE_OP):
            for _ in range(PER_QUEUE_OP - 2):
                x = jnp.cos(x)
            if number % 2:
                x = x + queue.dequeue()
            else:
                queue.enqueue(x)
                x = -x
        return x

    return fn


def passes_for(places: tuple[str, ...]) -> Iterator[Pass]:
    if places != DEVICES:
        yield from pipeline(ALONE, places)
        return
    for one in pipeline(devices=tuple(split_device_name(place)[1] for place in places)):
        yield one._replace(made_of=partial(schedule, least_bytes=0)) if one.name == "schedule" else one


def measured(fn: Callable[[jax.Array], Any], places: tuple[str, ...]) -> dict[str, float]:
    """Return the processor time of each stage, in s per node."""
    jaxpr, consts, _ = make_jaxpr(fn, ROW)
    found: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any], nodes: int) -> Any:
        gc.collect()
        gc.disable()
        started = time.thread_time()
        result = work()
        found[stage] = (time.thread_time() - started) / nodes
        gc.enable()
        return result

    graph, _, _ = timed("graph", lambda: graph_of(jaxpr, consts, ["x"]), len(jaxpr.eqns))
    graph = traced = spread(graph, places)
    nodes = len(graph.nodes)
    for one in passes_for(places):
        graph = timed(one.name, partial(run_passes, graph, [one]), nodes)
    keys = {ref: ref.name for ref in graph.refs}
    timed("plans", partial(make_plans, graph, ALONE, keys), nodes)
    found["all that a first call does"] = sum(found.values())
    timed("verify", partial(verify, traced), nodes)
    timed("verify lowered", partial(verify, graph), nodes)
    timed("text", partial(text, traced), nodes)
    return found


def spread(graph: Graph, places: tuple[str, ...]) -> Graph:
    """Return the graph with its variables assigned to the places in rotation."""
    if len(places) == 1:
        return graph
    placed = {ref: replace(ref, device=places[index % len(places)]) for index, ref in enumerate(graph.refs)}
    inputs = tuple(placed.get(value, value) for value in graph.inputs)
    return Graph(inputs, tuple(node.with_operands(placed) for node in graph.nodes), graph.outputs)


if __name__ == "__main__":
    main()
