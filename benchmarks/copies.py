"""Measure the memory saved by delayed copies, and their cost in time.

Layers of weights live on one device of the CPU and are used on another, in three functions: *there and back*, where a
third device computes a part of each layer; *straight*, without it, so that all layers are one program; and *trained*,
which is *there and back* with gradients and the update of the weights. Each runs with the pass `schedule` and without
it, in separate processes in alternation. Measured are the peak memory of the steps beyond the memory before them, and
the time of a step. *Predicted* is the pass's estimate for the device of the layers.

The last table is about sends between tasks: for a trained model with weights on another task, the number of sends that
could be delayed in time, and the number that their task could delay until it receives a value.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._launched import last_line_of
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks.memory import ALLOCATOR

LAYERS, WIDTH, BATCH, STEPS = 16, 2048, 256, 5
DEADLINE_S = 200.0
DEVICES = {"JAX_NUM_CPU_DEVICES": "3", "JAX_PLATFORMS": "cpu"}
PROGRAMS, WAYS = ("there and back", "straight", "trained"), ("late", "at once")
WORKER, ELSEWHERE = "/job:worker/task:0", "/job:ps/task:0"


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        if sys.argv[2] == "sends":
            sends()
        else:
            run(*sys.argv[2:])
        return
    given = options(__doc__, rounds=3)
    rows = []
    for program in PROGRAMS:
        found = in_turn({way: partial(in_a_process, program, way) for way in WAYS}, given.rounds)
        late, at_once = ({key: [one[key] for one in found[way]] for key in found[way][0]} for way in WAYS)
        row: dict[str, Any] = {"program": program, "copies": int(late["copies"][0]), "late": int(late["late"][0])}
        for figure in ("predicted MB", "measured MB"):
            row |= {f"{figure} at once": median(at_once[figure]), "late ": median(late[figure])}
            row[f"{figure} late"] = row.pop("late ")
        ratio, low, high = median_ratio(late["s"], at_once["s"])
        rows.append(row | {"time, late / at once": ratio, "p10": low, "p90": high})
    publish("copies", rows, as_json=given.json)
    publish("sends", [json.loads(in_a_child("sends", ""))], as_json=given.json)


def in_a_process(program: str, way: str) -> dict[str, float]:
    figures: dict[str, float] = json.loads(in_a_child(program, way))
    return figures


def in_a_child(program: str, way: str) -> str:
    return last_line_of("copies", ("--run", program, way), timeout_s=DEADLINE_S, **ALLOCATOR, **DEVICES)


def function(program: str) -> Callable[[Any], Any]:
    """Return one of the programs, over new variables."""
    import jax.numpy as jnp

    import dflow

    with dflow.device("cpu:0"):
        weights = [dflow.Variable(lambda: jnp.full((WIDTH, WIDTH), 1e-3)) for _ in range(LAYERS)]

    def layers(x: Any) -> Any:
        for weight in weights:
            with dflow.device("cpu:1"):
                x = jnp.tanh(x @ weight)
            if program != "straight":
                with dflow.device("cpu:2"):
                    x = x - x.mean(0)
        return x

    def trained(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda x: (layers(x) ** 2).mean(), weights)(x)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-3 * gradient)
        return value

    return trained if program == "trained" else layers


def run(program: str, way: str) -> None:
    """Print the figures of a program run in one way, with or without the pass."""
    import jax
    import jax.numpy as jnp

    from dflow.lowering.passes.base import run_passes
    from dflow.lowering.pipeline import ALONE, pipeline
    from dflow.lowering.placement.timeline import timeline
    from dflow.lowering.steps.local_step import LocalStep
    from dflow.lowering.steps.lowered import literals, make_plans
    from dflow.lowering.values.devices import devices_in_order
    from dflow.state_backends import LOCAL
    from dflow.tracing.ir import ops
    from dflow.tracing.jaxprs.trace import trace

    x = jnp.ones((BATCH, WIDTH))
    traced = trace(function(program), (x,), {})
    passes = [one for one in pipeline(devices=devices_in_order()) if way == "late" or one.name != "schedule"]
    graph = run_passes(traced.graph, passes)
    keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
    lowered = make_plans(graph, ALONE, keys)[ALONE]
    step, _ = LocalStep(traced, lowered, literals(graph), LOCAL.store, None).lower().compile(None)
    copies = [node for node in graph.nodes if node.op is ops.dev_copy]
    before = reset_peak_mb()
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        jax.block_until_ready(step([x]))
        jax.block_until_ready([variable.read() for variable in traced.variables[-1:]])
        times.append(time.perf_counter() - started)
    figures = {
        "copies": len(copies),
        "late": sum(bool(copy.after) for copy in copies),
        "predicted MB": timeline(graph).peak_bytes[f"{ALONE}/device:cpu:1"] / 1e6,
        "measured MB": status_mb("VmHWM") - before,
        "s": median(times),
    }
    print(json.dumps(figures))


def reset_peak_mb() -> float:
    """Reset the peak of this process's memory, and return its current memory, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_mb("VmRSS")


def status_mb(figure: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(figure)) / 1e3


def sends() -> None:
    """Print the number of sends that could wait, for a model trained on two tasks."""
    from dataclasses import replace

    import jax.numpy as jnp

    import dflow
    from dflow.lowering.passes.base import run_passes
    from dflow.lowering.pipeline import pipeline
    from dflow.lowering.placement.timeline import timeline
    from dflow.tracing.ir import ops

    weights = [dflow.Variable(lambda: jnp.zeros((WIDTH, WIDTH))) for _ in range(LAYERS)]

    def trained(x: Any) -> Any:
        def loss() -> Any:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return (y**2).mean()

        value, gradients = dflow.value_and_grad(loss, weights)()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-3 * gradient)
        return value

    graph = dflow.graph(trained, jnp.ones((BATCH, WIDTH))).graph
    placed = {ref: replace(ref, device=ELSEWHERE) for ref in graph.refs}
    inputs = tuple(placed.get(value, value) for value in graph.inputs)
    graph = replace(graph, inputs=inputs, nodes=tuple(node.with_operands(placed) for node in graph.nodes))
    lowered = run_passes(graph, pipeline(WORKER, (WORKER, ELSEWHERE)))
    known = timeline(lowered)
    received = {(node.attributes["edge"], node.device): node for node in lowered.nodes if node.op is ops.net_recv}
    spare = held = 0
    sent = [number for number, node in enumerate(lowered.nodes) if node.op is ops.net_send]
    for number in sent:
        node = lowered.nodes[number]
        values = received[node.attributes["edge"], node.attributes["destination"]].outputs
        needed = min(known.start[user] for value in values for user in known.users[value])
        latest = needed - (known.end[number] - known.start[number])
        arrivals = [
            known.end[other]
            for other, one in enumerate(lowered.nodes)
            if one.op is ops.net_recv and one.device == node.device
        ]
        spare += latest > known.start[number]
        held += any(known.start[number] < arrival <= latest for arrival in arrivals)
    print(json.dumps({"sends": len(sent), "with time to spare": spare, "that a receive could hold back": held}))


if __name__ == "__main__":
    main()
