from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.placement.calls import LEAST_S, as_calls
from dflow.lowering.placement.problem import Problem
from dflow.lowering.placement.search import predicted
from dflow.lowering.placement.simulate import simulate
from tests.effort import examples
from tests.lowering.placement.problems import assignments, machine, problem, problems


@settings(max_examples=examples(80), deadline=None)
@given(problems(most_units=10), st.data())
def test_calls_come_after_all_they_need_and_do_the_same_work_with_the_same_transfers(
    drawn: Problem, data: st.DataObject
) -> None:
    assignment = data.draw(assignments(drawn))
    calls, devices, of_unit = as_calls(drawn, assignment)
    assert all(earlier < later for later, needed in enumerate(calls.predecessors) for earlier in needed)
    assert [devices[of_unit[number]] for number in range(len(drawn.units))] == list(assignment)
    for device in drawn.machine.devices:
        of_units = sum(u.seconds[device] for u, d in zip(drawn.units, assignment, strict=True) if d == device)
        of_calls = sum(u.seconds[device] for u, d in zip(calls.units, devices, strict=True) if d == device)
        assert of_units == of_calls
    one, other = simulate(drawn, assignment), simulate(calls, devices)
    assert {move[:3] for move in one.transfers} == {move[:3] for move in other.transfers}


@settings(max_examples=examples(60), deadline=None)
@given(problems(most_units=10), st.data())
def test_what_another_device_waits_for_waits_for_nothing_long_that_it_does_not_need(
    drawn: Problem, data: st.DataObject
) -> None:
    """What is in a call with it leads across too, or touches state as it does; or all the rest together is short."""
    assignment = data.draw(assignments(drawn))
    _, _, of_unit = as_calls(drawn, assignment)
    for call in set(of_unit):
        units = [number for number in range(len(drawn.units)) if of_unit[number] == call]
        across = [number for number in units if leads_across(drawn, assignment, of_unit, number)]
        if across and not any(drawn.units[number].touches_state for number in units):
            rest = [number for number in units if number not in across]
            assert sum(drawn.units[number].seconds[assignment[number]] for number in rest) < LEAST_S


def leads_across(drawn: Problem, assignment: tuple[int, ...], of_unit: tuple[int, ...], unit: int) -> bool:
    return any(
        assignment[later] != assignment[unit]
        or (of_unit[later] == of_unit[unit] and leads_across(drawn, assignment, of_unit, later))
        for later in drawn.successors[unit]
    )


def test_a_branch_is_sent_before_the_other_is_worked_on() -> None:
    fork = problem(
        machine(2, latency_s=1.0, bytes_per_s=4.0),
        [("split", 2, []), ("a", 5, [0]), ("b", 5, [0]), ("join", 1, [1, 2])],
        size=4,
    )
    calls, devices, of_unit = as_calls(fork, (0, 0, 1, 0))
    assert [unit.seconds[0] for unit in calls.units] == [2.0, 5.0, 5.0, 1.0]
    assert devices == (0, 0, 1, 0)
    assert of_unit == (0, 1, 2, 3)
    together = as_calls(fork, (0, 0, 0, 0))
    assert [unit.seconds[0] for unit in together[0].units] == [13.0]


def test_a_step_is_predicted_by_its_calls() -> None:
    chain = problem(machine(2, launch_s=1.0), [("a", 1, []), ("b", 1, [0]), ("c", 1, [1])])
    assert simulate(chain, (0, 0, 0)).step_s == 6.0
    assert predicted(chain, (0, 0, 0)).step_s == 4.0
