from __future__ import annotations

import dataclasses
import random
import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.placement.problem import Problem
from dflow.lowering.placement.search import all_on, alternatives, choose, in_parts, regions, scored
from dflow.lowering.placement.simulate import simulate
from dflow.tracing.errors import DeviceError
from tests.effort import examples
from tests.lowering.placement.problems import assignments, layered, machine, problem, problems


def allows(drawn: Problem, assignment: tuple[int, ...]) -> bool:
    return all(device in unit.devices for unit, device in zip(drawn.units, assignment, strict=True))


@settings(max_examples=examples(40), deadline=None)
@given(problems(most_units=14))
def test_what_is_chosen_is_never_worse_than_what_it_starts_from(drawn: Problem) -> None:
    chosen = choose(drawn)
    assert allows(drawn, chosen.assignment)
    assert chosen == scored(drawn, chosen.assignment)
    for simple in (in_parts(drawn), *(all_on(drawn, device) for device in drawn.machine.devices)):
        assert allows(drawn, simple)
        assert chosen.score <= scored(drawn, simple).score


@settings(max_examples=examples(40), deadline=None)
@given(problems(most_units=8, least_units=4))
def test_no_move_of_a_unit_makes_what_was_chosen_shorter(drawn: Problem) -> None:
    chosen = choose(drawn)
    for number, unit in enumerate(drawn.units):
        for device in unit.devices:
            new = (*chosen.assignment[:number], device, *chosen.assignment[number + 1 :])
            assert chosen.score <= scored(drawn, new).score


def test_choices_for_small_graphs_come_close_to_the_optimum() -> None:
    """Over the sum of 25 graphs of 7 units on 2 devices: within a twentieth."""
    ours = best = 0.0
    for seed in range(25):
        drawn = layered(random.Random(seed), 7, 3, machine(2))
        ours += choose(drawn).step_s
        best += min(scored(drawn, one).step_s for one in product(*(unit.devices for unit in drawn.units)))
    assert best <= ours <= 1.05 * best


def test_a_search_ends_when_it_is_told() -> None:
    drawn = layered(random.Random(3), 30, 4, machine(2))
    asked: list[int] = []

    def is_over() -> bool:
        asked.append(1)
        return len(asked) > 7

    found = choose(drawn, is_over=is_over)
    assert len(asked) < 20
    assert found.score <= scored(drawn, all_on(drawn, 0)).score


def with_limits(drawn: Problem, *limits: int | None) -> Problem:
    return dataclasses.replace(drawn, machine=dataclasses.replace(drawn.machine, limits=limits))


def test_memory_decides_where_time_would_not() -> None:
    """Two units with state of 60 bytes each, and devices with 100: separately they fit, at the cost of a transfer."""
    drawn = problem(machine(2, latency_s=5.0), [("a", 1, []), ("b", 1, [0])])
    units = tuple(dataclasses.replace(unit, state_bytes=60) for unit in drawn.units)
    drawn = Problem(drawn.machine, units, drawn.values)
    assert choose(drawn).assignment == (0, 0)
    found = choose(with_limits(drawn, 100, 100))
    assert sorted(found.assignment) == [0, 1]
    assert max(simulate(drawn, found.assignment).peak_bytes) <= 100


def test_too_little_memory_is_refused_with_what_is_needed_and_what_there_is() -> None:
    drawn = problem(machine(2), [("a", 1, []), ("b", 1, [0])], size=50, pinned={0: 0, 1: 0})
    message = (
        "no placement was found that fits: of the best, cpu:0 needs 150 bytes at its peak, but it has 90\n"
        "  offer more devices, put variables on others, or make the batch smaller"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        choose(with_limits(drawn, 90, 90))


def test_variables_that_do_not_fit_where_they_live_are_refused() -> None:
    drawn = problem(machine(2), [("a", 1, []), ("b", 1, [0])], pinned={0: 1})
    units = (dataclasses.replace(drawn.units[0], state_bytes=3000), drawn.units[1])
    drawn = Problem(drawn.machine, units, drawn.values)
    message = "the variables on cpu:1 take 3,000 bytes, but it has 2,500\n  at .*\n  create some of them"
    with pytest.raises(DeviceError, match=f"^{message}"):
        choose(with_limits(drawn, None, 2500))


def test_the_next_best_device_of_each_region_and_what_it_would_cost() -> None:
    fork = problem(
        machine(2, latency_s=1.0, bytes_per_s=4.0), [("a", 5, []), ("b", 5, []), ("join", 1, [0, 1])], size=2
    )
    chosen = choose(fork)
    assert chosen.step_s == 7.5
    assert chosen.assignment == (0, 1, 1)
    assert regions(fork, chosen.assignment) == [(0,), (1, 2)]
    assert alternatives(fork, chosen.assignment) == [((0,), 1, 11.0 + 1.5 - 7.5), ((1, 2), 0, 11.0 - 7.5)]


@settings(max_examples=examples(40), deadline=None)
@given(problems(most_units=10), st.data())
def test_a_region_is_joined_on_one_device_and_no_two_touch_there(drawn: Problem, data: st.DataObject) -> None:
    assignment = data.draw(assignments(drawn))
    found = regions(drawn, assignment)
    movable = [number for number, unit in enumerate(drawn.units) if len(unit.devices) > 1]
    assert sorted(unit for region in found for unit in region) == movable
    region_of = {unit: number for number, region in enumerate(found) for unit in region}
    assert all(len({assignment[unit] for unit in region}) == 1 for region in found)
    for number, needed in enumerate(drawn.predecessors):
        for earlier in needed:
            if earlier in region_of and number in region_of and assignment[earlier] == assignment[number]:
                assert region_of[earlier] == region_of[number]
