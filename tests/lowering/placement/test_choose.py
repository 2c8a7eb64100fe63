from __future__ import annotations

import dataclasses
import random
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflow.lowering.placement.choose import SEARCHES, all_on, choose, starting_points
from dflow.lowering.placement.exhaustive import every, exhaustive, size
from dflow.lowering.placement.greedy import greedy
from dflow.lowering.placement.problem import Problem
from dflow.lowering.placement.regions import alternatives, better, regions
from dflow.lowering.placement.score import scored
from dflow.lowering.placement.search import search
from dflow.lowering.placement.simulate import simulate
from dflow.tracing.errors import DeviceError
from tests.effort import examples
from tests.lowering.placement.problems import layered, machine, problem, problems
from tests.lowering.placement.test_simulate import drawn_assignment

LOOKS = [(False, False), (False, True), (True, False), (True, True)]


@settings(max_examples=examples(100), deadline=None)
@given(problems(most_units=14, limits=True), st.sampled_from(LOOKS))
def test_greedy_keeps_the_constraints(drawn: Problem, looks: tuple[bool, bool]) -> None:
    assert drawn.allows(greedy(drawn, fills_gaps=looks[0], looks_ahead=looks[1]))


@settings(max_examples=examples(60), deadline=None)
@given(problems(most_units=14, limits=True), st.integers(0, 99))
def test_search_keeps_the_constraints_and_is_never_worse_than_its_start(drawn: Problem, seed: int) -> None:
    for start in starting_points(drawn):
        assert drawn.allows(start)
        found = search(drawn, start, turns=30, seed=seed)
        assert drawn.allows(found.assignment)
        assert found.score <= scored(drawn, start).score
        assert found == scored(drawn, found.assignment)


@settings(max_examples=examples(40), deadline=None)
@given(problems(most_units=14), st.integers(0, 99))
def test_what_is_chosen_is_never_worse_than_all_on_one_device(drawn: Problem, seed: int) -> None:
    chosen = choose(drawn, turns=60, seed=seed)
    assert drawn.allows(chosen.assignment)
    for device in drawn.machine.devices:
        assert chosen.score <= scored(drawn, all_on(drawn, device)).score


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 99))
def test_the_same_seed_and_turns_choose_the_same(graph: int, seed: int) -> None:
    drawn = layered(random.Random(graph), 20, 4, machine(3))
    assert choose(drawn, turns=80, seed=seed) == choose(drawn, turns=80, seed=seed)


@settings(max_examples=examples(60), deadline=None)
@given(problems(most_units=7, limits=True))
def test_exhaustive_search_is_the_best_of_all_that_keep_the_constraints(drawn: Problem) -> None:
    found = list(every(drawn))
    assert len(found) == len(set(found)) == size(drawn)
    assert all(map(drawn.allows, found))
    assert exhaustive(drawn).score == min(scored(drawn, one).score for one in found)


@settings(max_examples=examples(40), deadline=None)
@given(problems(most_units=8, least_units=4))
def test_search_comes_within_a_twentieth_of_the_optimum_of_drawn_problems(drawn: Problem) -> None:
    """Up to 8 units on up to 3 unequal devices, some pinned or colocated, without limits of memory."""
    assume(1 < size(drawn) <= 3000)
    best = min(
        search(drawn, start, turns=400, seed=number)
        for number, start in enumerate(sorted(starting_points(drawn), key=lambda s: scored(drawn, s).score)[:SEARCHES])
    )
    assert best.step_s <= exhaustive(drawn).step_s * 1.05


def test_a_search_ends_when_it_is_told() -> None:
    drawn = layered(random.Random(3), 30, 4, machine(2))
    asked: list[int] = []

    def is_over() -> bool:
        asked.append(1)
        return len(asked) > 7

    search(drawn, all_on(drawn, 0), turns=1000, is_over=is_over)
    assert len(asked) == 8


def with_limits(drawn: Problem, *limits: int | None) -> Problem:
    target = drawn.machine
    return Problem(
        dataclasses.replace(target, limits=limits),
        drawn.units,
        drawn.values,
        drawn.together,
        drawn.fuses,
    )


def test_memory_decides_where_time_would_not() -> None:
    """Two units with state of 60 bytes each, and devices with 100: separately they fit, at the cost of a transfer."""
    drawn = problem(machine(2, latency_s=5.0), [("a", 1, []), ("b", 1, [0])])
    units = tuple(dataclasses.replace(unit, state_bytes=60) for unit in drawn.units)
    drawn = Problem(drawn.machine, units, drawn.values, drawn.together)
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
    drawn = Problem(drawn.machine, units, drawn.values, drawn.together)
    message = "the variables on cpu:1 take 3,000 bytes, but it has 2,500\n  create some of them on another device"
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        choose(with_limits(drawn, None, 2500))


def test_units_that_belong_together_and_may_not_be_are_named_with_their_devices() -> None:
    drawn = problem(machine(3), [("a", 1, []), ("b", 1, [0])], pinned={0: 1, 1: 2})
    drawn = dataclasses.replace(drawn, together=((0, 1),))
    message = (
        "these belong together, and may be on no one device: a on cpu:1; b on cpu:2\n"
        "  state one device for all of them, or none"
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        choose(drawn)


def test_the_next_best_device_of_each_region_and_what_it_would_cost() -> None:
    fork = problem(
        machine(2, latency_s=1.0, bytes_per_s=4.0), [("a", 5, []), ("b", 5, []), ("join", 1, [0, 1])], size=2
    )
    chosen = choose(fork)
    assert chosen.step_s == 7.5
    assert chosen.assignment == (0, 1, 1)
    assert regions(fork, chosen.assignment) == [(0,), (1, 2)]
    assert alternatives(fork, chosen.assignment) == [((0,), 1, 11.0 + 1.5 - 7.5), ((1, 2), 0, 11.0 - 7.5)]


@settings(max_examples=examples(60), deadline=None)
@given(problems(most_units=10), st.data())
def test_a_region_is_joined_on_one_device_and_no_two_touch_there(drawn: Problem, data: st.DataObject) -> None:
    assignment = drawn_assignment(data, drawn)
    found = regions(drawn, assignment)
    movable = [block for block, choices in enumerate(drawn.choices) if len(choices) > 1]
    assert sorted(block for region in found for block in region) == movable
    region_of = {block: number for number, region in enumerate(found) for block in region}
    device = [assignment[block[0]] for block in drawn.together]
    assert all(len({device[block] for block in region}) == 1 for region in found)
    for number, needed in enumerate(drawn.predecessors):
        for earlier in needed:
            one, other = drawn.block_of[number], drawn.block_of[earlier]
            if one in region_of and other in region_of and device[one] == device[other]:
                assert region_of[one] == region_of[other]


@settings(max_examples=examples(30), deadline=None)
@given(problems(most_units=12))
def test_no_single_move_makes_what_was_chosen_better(drawn: Problem) -> None:
    assert better(drawn, choose(drawn, turns=20)) is None
