"""Placement problems for tests: random ones, and families like those of models."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from dflow.lowering.placement.problem import DeviceLink, Machine, Moved, Problem, Unit


def machine(
    count: int, latency_s: float = 1.0, bytes_per_s: float = 1.0, launch_s: float = 0.0, speeds: tuple[float, ...] = ()
) -> Machine:
    """A machine with `count` equal devices."""
    link = DeviceLink(latency_s, bytes_per_s)
    return Machine(
        tuple(f"cpu:{number}" for number in range(count)),
        tuple((link,) * count for _ in range(count)),
        (launch_s,) * count,
        (None,) * count,
        (0,) * count,
        (speeds,),
    )


@st.composite
def problems(
    draw: st.DrawFn, most_units: int = 8, most_devices: int = 3, limits: bool = False, least_units: int = 1
) -> Problem:
    """Any problem: unequal devices and links, inputs, outputs, order, pinned units.

    All times are exact in binary, so that two simulations of one step agree to the last bit.
    """
    numbers = st.integers(0, 9)
    count = draw(st.integers(1, most_devices))
    links = [
        [DeviceLink(draw(numbers) / 2, draw(st.sampled_from([0.25, 0.5, 1.0, 2.0]))) for _ in range(count)]
        for _ in range(count)
    ]
    sizes = draw(st.integers(least_units, most_units))
    values: list[Moved] = [
        Moved(draw(numbers), None, draw(st.integers(0, count - 1))) for _ in range(draw(st.integers(0, 2)))
    ]
    units: list[Unit] = []
    for number in range(sizes):
        takes = draw(st.lists(st.sampled_from(range(len(values))), max_size=3, unique=True)) if values else []
        after = draw(st.lists(st.sampled_from(range(number)), max_size=1)) if number else []
        pinned = draw(st.sampled_from([None, None, None, *range(count)]))
        units.append(
            Unit(
                tuple(float(draw(numbers)) for _ in range(count)),
                tuple(takes),
                tuple(after),
                tuple(range(count)) if pinned is None else (pinned,),
                draw(numbers),
                draw(numbers),
                draw(st.booleans()),
            )
        )
        values += [Moved(draw(numbers), number, None, draw(st.booleans())) for _ in range(draw(st.integers(0, 2)))]
    bounds = [draw(st.integers(20, 120)) if limits and draw(st.booleans()) else None for _ in range(count)]
    names = tuple(f"cpu:{number}" for number in range(count))
    pools = tuple(draw(st.integers(0, 1)) for _ in range(count))
    speeds = tuple(draw(st.sampled_from([(), (1.0, 0.5), (1.0, 0.5, 0.25)])) for _ in range(2))
    launch = tuple(draw(st.integers(0, 1)) / 2 for _ in range(count))
    return Problem(
        Machine(names, tuple(map(tuple, links)), launch, tuple(bounds), pools, speeds),
        tuple(units),
        tuple(values),
    )


def assignments(drawn: Problem) -> st.SearchStrategy[tuple[int, ...]]:
    """Any assignment of the units to devices where they may run."""
    return st.tuples(*(st.sampled_from(unit.devices) for unit in drawn.units))


def problem(
    target: Machine,
    units: Sequence[tuple[str, float, Sequence[int]]],
    size: int = 1,
    pinned: dict[int, int] | None = None,
) -> Problem:
    """A problem with units `(name, seconds, operands)`, where operands are numbers of units; each value has `size`
    bytes.

    A unit without operands takes an input on the first device; a value without users is an output.
    """
    used = {needed for _, _, needs in units for needed in needs}
    values = [Moved(size, None, 0)]
    values += [Moved(size, number, None, number not in used) for number in range(len(units))]
    made = [
        Unit(
            (seconds,) * len(target.names),
            tuple(1 + needed for needed in needs) or (0,),
            (),
            tuple(target.devices) if number not in (pinned or {}) else ((pinned or {})[number],),
        )
        for number, (_, seconds, needs) in enumerate(units)
    ]
    return Problem(target, tuple(made), tuple(values))


def layered(draws: random.Random, count: int, width: int, target: Machine, size: int = 1) -> Problem:
    """A random graph in layers of up to `width` units."""
    units: list[tuple[str, float, list[int]]] = []
    layer: list[int] = []
    while len(units) < count:
        new = range(len(units), min(count, len(units) + draws.randint(1, width)))
        for number in new:
            needs = sorted(draws.sample(layer, min(len(layer), draws.randint(1, 3)))) if layer else []
            units.append((f"u{number}", draws.choice([1.0, 2.0, 5.0, 10.0]), needs))
        layer = list(new)
    return problem(target, units, size)
