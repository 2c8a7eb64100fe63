from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.placement.problem import DeviceLink, Problem
from dflow.lowering.placement.simulate import simulate
from tests.effort import examples
from tests.lowering.placement.problems import assignments, machine, problem, problems
from tests.lowering.placement.slow_simulation import slow_simulation


@settings(max_examples=examples(100), deadline=None)
@given(problems(), st.data())
def test_a_simulation_equals_the_direct_one(drawn: Problem, data: st.DataObject) -> None:
    assignment = data.draw(assignments(drawn))
    found, slow = simulate(drawn, assignment), slow_simulation(drawn, assignment)
    assert found.start_s == slow.start_s
    assert found.end_s == slow.end_s
    assert found.step_s == slow.step_s
    assert found.peak_bytes == slow.peak_bytes


def test_devices_that_share_processors_slow_each_other_down() -> None:
    two = problem(machine(2, latency_s=1.0, bytes_per_s=4.0, speeds=(1.0, 0.5)), [("a", 3, []), ("b", 5, [])], size=0)
    # From 1 to 5 both work at half speed until `a` ends; then `b` continues alone.
    found = simulate(two, (0, 1))
    assert (found.start_s, found.end_s, found.step_s) == ((0.0, 1.0), (5.0, 8.0), 8.0)
    assert found.busy_s == (5.0, 7.0)


def test_two_branches_on_two_devices_run_at_once_and_one_result_travels() -> None:
    fork = problem(
        machine(2, latency_s=1.0, bytes_per_s=4.0), [("a", 5, []), ("b", 5, []), ("join", 1, [0, 1])], size=2
    )
    together, apart = simulate(fork, (0, 0, 0)), simulate(fork, (0, 1, 0))
    assert (together.step_s, together.busy_s) == (11.0, (11.0, 0.0))
    # The argument travels for 1.5 s, 5 s of work follow, then the result travels for 1.5 s, then 1 s of work.
    assert (apart.step_s, apart.busy_s) == (9.0, (6.0, 5.0))
    # On the first device: the argument to the end, the results of a and b, and the result of join while it runs.
    assert apart.peak_bytes == (8, 4)


def test_what_a_value_has_over_the_knee_of_a_link_goes_at_the_rate_beyond() -> None:
    link = DeviceLink(1.0, 4.0, 8.0, 0.5)
    assert [link.occupied_s(size) for size in (0, 4, 8, 9, 12)] == [0.0, 1.0, 2.0, 4.0, 10.0]
    assert link.seconds(12) == 11.0
    assert DeviceLink(1.0, 4.0).occupied_s(1 << 40) == 2.0**38
