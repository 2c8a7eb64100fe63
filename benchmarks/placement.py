"""Measure the quality of the cost model's placements, and of its predictions of step times.

Simulated, for families of graphs on equal devices of one host: the step time of the chosen placement, and relative to
it those of all ops on one device, round-robin, the best of 100 random placements, and HEFT as published; and, for small
graphs, of the optimum of all placements. Measured, on two devices that share the CPU's cores: the step time of several
placements of real functions, beside the predictions.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from statistics import mean, median
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp

import dflow
from benchmarks._paired import in_turn, options, publish
from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.choose import Choose, Decision, settled
from dflow.lowering.passes.place import Place
from dflow.lowering.pipeline import ALONE, SIMPLIFY
from dflow.lowering.placement.measure import Meter
from dflow.lowering.placement.problem import Assignment, DeviceLink, Machine, Moved, Problem, Unit
from dflow.lowering.placement.search import Scored, all_on, choose, scored
from dflow.state_backends import LOCAL
from dflow.tracing.jaxprs.trace import trace

#: A link of one host (latency in s, bytes per second), and the time to launch a program, in s.
LINK, LAUNCH_S = DeviceLink(20e-6, 10e9), 10e-6
MB = 1 << 20
#: Number of consecutive steps in a measurement.
ROW = 3


def main() -> None:
    given = options(__doc__, seeds=3, small=10, rounds=9)
    publish("placement_simulated", simulated(given.seeds, given.small), as_json=given.json)
    rows = [row for by, clock in CLOCKS.items() for row in measured(given.rounds, by, clock)]
    publish("placement_measured", rows, as_json=given.json)


# Families of graphs. A unit is (seconds, the units whose values it takes, bytes of its value, its device if pinned).

Row = tuple[float, list[int], int, int | None]


def problem(rows: Sequence[Row], devices: int) -> Problem:
    machine = Machine(
        tuple(f"d{number}" for number in range(devices)),
        ((LINK,) * devices,) * devices,
        (LAUNCH_S,) * devices,
        (None,) * devices,
        tuple(range(devices)),
        ((),) * devices,
    )
    values = [Moved(MB, None, 0), *(Moved(size, number) for number, (_, _, size, _) in enumerate(rows))]
    units = tuple(
        Unit(
            (seconds,) * devices,
            tuple(1 + needed for needed in needs) or (0,),
            (),
            tuple(machine.devices) if pinned is None else (pinned % devices,),
        )
        for number, (seconds, needs, _, pinned) in enumerate(rows)
    )
    return Problem(machine, units, tuple(values))


def cost(draws: random.Random) -> float:
    """Draw the time of one unit: 0.1 to 2 ms."""
    return 1e-4 * draws.uniform(1, 20)


def size(draws: random.Random) -> int:
    """Draw the size of one value: 1/16 to 8 MB."""
    return int(MB * 2 ** draws.uniform(-4, 3))


def chain(draws: random.Random, scale: int) -> list[Row]:
    return [(cost(draws), [number - 1] if number else [], size(draws), None) for number in range(3 * scale)]


def fork_join(draws: random.Random, scale: int) -> list[Row]:
    rows: list[Row] = [(cost(draws) / 10, [], size(draws), None)]
    ends = []
    for _ in range(scale):
        last = 0
        for _ in range(2):
            rows.append((cost(draws), [last], size(draws), None))
            last = len(rows) - 1
        ends.append(last)
    return [*rows, (cost(draws) / 10, ends, size(draws), None)]


def transformer(draws: random.Random, scale: int) -> list[Row]:
    """Layers of two groups of heads and a projection, and of two halves of a wide layer and their sum."""
    rows: list[Row] = [(cost(draws) / 10, [], MB, None)]
    for _ in range(max(1, scale // 3)):
        for weight in (1.0, 1.5):
            start, each = len(rows) - 1, weight * 5e-4
            rows += [(each, [start], MB // 2, None), (each, [start], MB // 2, None)]
            rows.append((2e-4, [start, start + 1, start + 2], MB, None))
    return rows


def embedding(draws: random.Random, scale: int) -> list[Row]:
    """Lookups and updates on the devices of the tables, a layer on each, and a tower on all."""
    rows: list[Row] = [(cost(draws) / 5, [], MB // 2, number) for number in range(scale)]
    rows += [(cost(draws), [number], MB // 8, None) for number in range(scale)]
    rows += [(cost(draws), list(range(scale, 2 * scale)), MB // 4, None)]
    rows += [(cost(draws), [len(rows) - 1], MB // 2, None)]
    return rows + [(cost(draws) / 5, [2 * scale + 1], 8, number) for number in range(scale)]


def layered(draws: random.Random, scale: int) -> list[Row]:
    rows: list[Row] = []
    layer: list[int] = []
    while len(rows) < 4 * scale:
        new = range(len(rows), min(4 * scale, len(rows) + draws.randint(1, scale)))
        for _ in new:
            needs = sorted(draws.sample(layer, min(len(layer), draws.randint(1, 3))))
            rows.append((cost(draws), needs, size(draws), None))
        layer = list(new)
    return rows


FAMILIES: dict[str, Callable[[random.Random, int], list[Row]]] = {
    "chain": chain,
    "fork-join": fork_join,
    "transformer": transformer,
    "embedding": embedding,
    "layered random": layered,
}


# Placements to compare with.


def round_robin(problem: Problem) -> Assignment:
    return tuple(unit.devices[number % len(unit.devices)] for number, unit in enumerate(problem.units))


def optimum(problem: Problem) -> Scored:
    """Return the best of all assignments."""
    return min(scored(problem, assignment) for assignment in product(*(unit.devices for unit in problem.units)))


def best_of_random(problem: Problem, seed: int, count: int = 100) -> Scored:
    draws = random.Random(seed)
    drawn = (tuple(draws.choice(unit.devices) for unit in problem.units) for _ in range(count))
    return min(scored(problem, assignment) for assignment in drawn)


def ranks(problem: Problem) -> list[float]:
    """Return the longest path, in s, from the start of each unit to the end, at mean costs: the upward rank of HEFT.

    H. Topcuoglu, S. Hariri, M. Wu: Performance-effective and low-complexity task scheduling for heterogeneous
    computing. IEEE TPDS 13 (2002).
    """
    machine = problem.machine
    links = [machine.links[a][b] for a in machine.devices for b in machine.devices if a != b]
    latency, per_byte = mean([link.latency_s for link in links]), mean([1 / link.bytes_per_s for link in links])
    found = [0.0] * len(problem.units)
    for number in reversed(range(len(problem.units))):
        unit, rest = problem.units[number], 0.0
        for value in problem.gives[number]:
            transfer = latency + problem.values[value].size_bytes * per_byte
            rest = max([rest, *(transfer + found[taker] for taker in problem.takers[value])])
        found[number] = mean([problem.cost(number, device) for device in unit.devices]) + rest
    return found


def heft(problem: Problem) -> Assignment:
    """HEFT as published: insertion into gaps; each edge pays for its own transfer, and links are never busy."""
    rank = ranks(problem)
    order = sorted(range(len(problem.units)), key=lambda number: (-rank[number], number))
    end: dict[int, float] = {}
    where: dict[int, int] = {}
    work: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in problem.machine.names]

    def finish(number: int, device: int) -> tuple[float, float]:
        ready = 0.0
        for value in problem.units[number].takes:
            moved = problem.values[value]
            source = moved.source if moved.producer is None else where[moved.producer]
            assert source is not None
            made = 0.0 if moved.producer is None else end[moved.producer]
            travel = 0.0 if source == device else problem.machine.links[source][device].seconds(moved.size_bytes)
            ready = max(ready, made + travel)
        needed = problem.cost(number, device)
        for (_, one), (other, _) in pairwise(work[device]):
            if max(one, ready) + needed <= other:
                return max(one, ready) + needed, needed
        return max(work[device][-1][1], ready) + needed, needed

    for number in order:
        ((end[number], needed), where[number]) = min(
            (finish(number, device), device) for device in problem.units[number].devices
        )
        work[where[number]].append((end[number] - needed, end[number]))
        work[where[number]].sort()
    return tuple(where[number] for number in range(len(problem.units)))


def simulated(seeds: int, drawn: int) -> list[dict[str, Any]]:
    """Return step times relative to the chosen placement, for graphs of 25 to 48 units and for small graphs.

    Small graphs allow an exhaustive search for the optimum.
    """
    large = [
        compared(name, [problem(make(random.Random(seed), 12), 4) for seed in range(seeds)])
        for name, make in FAMILIES.items()
    ]
    return large + [
        compared(name, [largest(make, seed, devices, most) for seed in range(drawn)], is_small=True)
        for name, make in FAMILIES.items()
        for devices, most in ((2, 1 << 11), (3, 3**7))
    ]


#: The placements compared with the chosen one.
OTHERS = ("all on one", "round-robin", "best of 100 random", "HEFT", "optimum")


def largest(make: Callable[[random.Random, int], list[Row]], seed: int, devices: int, most: int) -> Problem:
    """Return the largest drawn graph with at most `most` placements."""
    draws, scale = random.Random(seed), 6
    found = problem(make(draws, scale), devices)
    while options_of(found) > most:
        scale -= 1
        found = problem(make(draws, scale), devices)
    return found


def compared(family: str, instances: Sequence[Problem], *, is_small: bool = False) -> dict[str, Any]:
    """Return a row: medians over the instances of one family."""
    found: dict[str, list[float]] = {}
    for seed, instance in enumerate(instances):
        started = time.perf_counter()
        ours = choose(instance)
        taken = time.perf_counter() - started
        others = {
            "all on one": min(scored(instance, all_on(instance, device)).step_s for device in instance.machine.devices),
            "round-robin": scored(instance, round_robin(instance)).step_s,
            "best of 100 random": best_of_random(instance, seed).step_s,
            "HEFT": scored(instance, heft(instance)).step_s,
        }
        if is_small:
            others["optimum"] = optimum(instance).step_s
        figures = {"chosen ms": ours.step_s * 1e3, **{name: step_s / ours.step_s for name, step_s in others.items()}}
        for name, figure in (*figures.items(), ("worst", ours.step_s / min(others.values())), ("search s", taken)):
            found.setdefault(name, []).append(figure)
    middle = {name: median(figures) for name, figures in found.items()}
    return {
        "graphs": family,
        "devices": len(instances[0].machine.names),
        "drawn": len(instances),
        "units": median(len(instance.units) for instance in instances),
        "chosen ms": middle.pop("chosen ms"),
        **{
            name: middle.get(name, "-")
            for name in ("all on one", "round-robin", "best of 100 random", "HEFT", "optimum")
        },
        "HEFT worst": max(found["HEFT"]),
        "chosen / best other, worst": max(found["worst"]),
        "search s": middle["search s"],
    }


def options_of(problem: Problem) -> int:
    return prod(len(unit.devices) for unit in problem.units)


# Real functions.


def variable(device: str, *shape: int) -> dflow.Variable:
    with dflow.device(device):
        return dflow.Variable(jnp.full(shape, 0.01))


def branches() -> Callable[..., Any]:
    def step(x: jax.Array) -> Any:
        with dflow.device("auto"):
            one = other = x
            for _ in range(4):
                one, other = jnp.tanh(one @ one), jnp.sin(other @ other)
            return one, other

    return step


def layers() -> Callable[..., Any]:
    weights = [variable(f"cpu:{number % 2}", 512, 512) for number in range(6)]

    def step(x: jax.Array) -> jax.Array:
        with dflow.device("auto"):
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return x

    return step


def tables() -> Callable[..., Any]:
    held = [variable(f"cpu:{number % 2}", 20_000, 64) for number in range(4)]
    tower = variable("cpu:0", 256, 64)

    def step(x: jax.Array) -> jax.Array:
        with dflow.device("auto"):
            rows = (jnp.abs(x[:, :64]) * 1e4).astype(jnp.int32).reshape(-1) % 20_000
            looked = [jnp.tanh(table[rows] * 2.0) for table in held]
            return jnp.concatenate(looked, 1) @ tower

    return step


def training() -> Callable[..., Any]:
    weights = [variable("cpu:0", 512, 512), variable("cpu:1", 512, 512)]

    def step(x: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            with dflow.device("auto"):
                y = x
                for weight in weights:
                    y = jnp.tanh(y @ weight)
                return (y**2).mean()

        value, gradients = dflow.value_and_grad(loss, weights)()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return value

    return step


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "two branches of matmuls": branches,
    "6 layers, weights on both": layers,
    "look-ups, tables on both": tables,
    "training step, weights on both": training,
}


#: Wall time, which other programs affect; and the processor time of this process, which they do not.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def measured(rounds: int, by: str, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Measure the chosen placement, all on each device, round-robin and two random placements, interleaved."""
    x = jnp.full((512, 512), 0.001)
    rows = []
    for name, make in FUNCTIONS.items():
        traced = trace(make(), (x,), {})
        traced = replace(traced, graph=run_passes(traced.graph, SIMPLIFY))
        chooser = Choose(Place(ALONE, (ALONE,), ("cpu:0", "cpu:1")), Meter(clock=clock))
        decision = chooser.decide(traced.graph)
        instance = decision.problem
        draws = random.Random(0)
        placements = {
            "chosen": decision.found.assignment,
            "all on cpu:0": all_on(instance, 0),
            "all on cpu:1": all_on(instance, 1),
            "round-robin": round_robin(instance),
            **{f"random {n}": tuple(draws.choice(unit.devices) for unit in instance.units) for n in (1, 2)},
        }
        runs = {key: runner(traced, decision, assignment, x, clock) for key, assignment in placements.items()}
        in_turn(runs, 2)
        times = in_turn(runs, rounds)
        for key, assignment in placements.items():
            step_s = scored(instance, assignment).step_s
            rows.append(
                {
                    "time": by,
                    "function": name,
                    "placement": key,
                    "predicted ms": step_s * 1e3,
                    "measured ms": median(times[key]) * 1e3,
                    "measured / predicted": median(times[key]) / step_s,
                    "measured / chosen": median(a / b for a, b in zip(times[key], times["chosen"], strict=True)),
                }
            )
    return rows


def runner(
    traced: Any, decision: Decision, assignment: Assignment, x: jax.Array, clock: Callable[[], float]
) -> Callable[[], float]:
    """Return a function that runs `ROW` consecutive steps in this placement and returns the mean time of a step."""
    other = replace(decision, found=scored(decision.problem, assignment))
    run = LOCAL.runner(replace(traced, graph=settled(traced.graph, other)), check=False, observe=None)
    leaves, keys = [x], [held.key for held in traced.variables]

    def once() -> float:
        started = clock()
        for _ in range(ROW):
            result = run(leaves)
        jax.block_until_ready(result)
        LOCAL.store.wait(keys)
        return (clock() - started) / ROW

    return once


if __name__ == "__main__":
    main()
