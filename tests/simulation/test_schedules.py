"""The whole runtime on schedules with faults: the invariants hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.simulation import steps_program, tasks
from tests.simulation.checks import HOLDER_S
from tests.simulation.fault_schedule import FaultSchedule, simulate
from tests.simulation.faults import COORDINATOR, Faults, Outage, drawn_faults, parse_faults, with_drawn_losses
from tests.simulation.programs import PROGRAMS, ROUND_SNAPSHOTS, ROUNDS, SNAPSHOTS, STEPS, VARIABLES

#: The simulated code hardly depends on the versions of Python and JAX.
pytestmark = pytest.mark.once

#: Number of schedules of each program, more than find any planted fault (`mutations.SCHEDULES`), and work done in one.
SCHEDULES = {STEPS: 400, ROUNDS: 300, VARIABLES: 200, SNAPSHOTS: 30, ROUND_SNAPSHOTS: 20}
SHORT = {STEPS: 6, ROUNDS: 3, VARIABLES: 3, SNAPSHOTS: 6, ROUND_SNAPSHOTS: 4}
PARTS = 10
HOSTS = FaultSchedule(0).hosts


def _schedule(seed: int, program: str) -> FaultSchedule:
    """With two or three workers, and one or two ps tasks."""
    return FaultSchedule(seed, 2 + seed % 2, 1 + seed // 2 % 2, SHORT[program], program=program)


@pytest.fixture(scope="module", autouse=True)
def _young() -> Iterator[None]:
    """A schedule leaves much to collect, and nothing of what JAX made before it: that is not looked through again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.once
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_goes_wrong_by_a_seed_what_must_hold_holds(part: int, program: str) -> None:
    count = examples(SCHEDULES[program]) // PARTS
    for seed in range(part * count, (part + 1) * count):
        ended = simulate(_schedule(seed, program))
        assert not ended.broken, str(ended)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_schedule_gives_the_same_log(program: str) -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        simulate(FaultSchedule(10, program=program), log.append)
    assert len(logs[0]) > 50
    assert logs[0] == logs[1]


@given(seed=st.integers())
def test_faults_are_drawn_from_a_seed_and_read_as_they_are_written(seed: int) -> None:
    drawn = with_drawn_losses(drawn_faults(seed, HOSTS), seed, HOSTS[1:3])
    assert parse_faults(str(drawn)) == drawn == with_drawn_losses(drawn_faults(seed, HOSTS), seed, HOSTS[1:3])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("loss", r"there is no fault 'loss'.*such as loss=0\.1"),
        ("gain=1", "there is no fault 'gain'"),
        ("loss=1", "1 is not at least 0 and less than 1"),
        ("kill=worker:0@1", r"'worker:0@1' is not of the form HOST@SECONDS\+SECONDS"),
        ("cut=worker:0@1+2", "'worker:0' names one host"),
        ("at=lunch*1/ps:0+1", "there is no moment 'lunch'; there are creation, first call"),
        ("slow=worker:3*2", "a fault is of 'worker:3', and the hosts are coordinator, ps:0, ps:1, worker:0"),
        ("cut=ps:0/nobody@1+2", "a fault is of 'nobody'"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        simulate(FaultSchedule(0, faults=parse_faults(text)))


def test_all_tasks_return_to_a_snapshot_when_one_dies_and_steps_are_done_again() -> None:
    log: list[str] = []
    ended = simulate(FaultSchedule(0, faults=parse_faults("kill=ps:0@5+0.5"), program=SNAPSHOTS), log.append)
    assert not ended.broken, str(ended)
    assert [line for line in log if "ps:0, ps:1 returned to snapshot" in line]
    applied = [line.partition("applies ")[2] for line in log if "applies" in line and " ps:1 " in line]
    steps = {line.split()[1] for line in applied}
    assert len(steps) == 36
    assert len(applied) > 2 * len(steps)


def test_rounds_since_a_snapshot_are_done_again_on_all_tasks_when_one_dies() -> None:
    log: list[str] = []
    ended = simulate(FaultSchedule(0, faults=parse_faults("kill=ps:0@6+0.5"), program=ROUND_SNAPSHOTS), log.append)
    assert not ended.broken, str(ended)
    assert [line for line in log if "ps:0, ps:1 returned to snapshot" in line]
    applied = [line.split()[4] for line in log if "applies round" in line and "'first of ps:1'" in line]
    assert {*applied} == {*map(str, range(36))}
    assert len(applied) > 36


@pytest.mark.parametrize("fault", ["torn", "flip", "gone"])
def test_no_worker_goes_on_without_state_that_cannot_be_restored(fault: str) -> None:
    log: list[str] = []
    faults = parse_faults(f"{fault}=ps:0@0+9,kill=ps:1@4+0.5")
    ended = simulate(FaultSchedule(0, faults=faults, program=SNAPSHOTS), log.append)
    assert not ended.broken, str(ended)
    refused = {line.split()[1] for line in log if "is refused" in line and "ps:0 could not return" in line}
    assert refused == {"worker:0", "worker:1", "worker:2"}
    restarted = next(number for number, line in enumerate(log) if "ps:1'1" in line)
    assert not [line for line in log[restarted:] if "applies" in line]


def test_a_full_disk_leaves_the_snapshot_before() -> None:
    log: list[str] = []
    faults = parse_faults("full=ps:0@2.5+9,kill=ps:1@5+0.5")
    # With this seed, staleness has no bound that delays the first snapshot.
    ended = simulate(FaultSchedule(3, faults=faults, program=SNAPSHOTS), log.append)
    assert not ended.broken, str(ended)
    assert [line for line in log if "is abandoned" in line and "No space left" in line]
    assert [line for line in log if "returned to snapshot 1;" in line]


@pytest.mark.parametrize(
    ("seed", "workers", "ps", "steps"),
    # An update fails half done on a task that hangs, twice; and a value of a step comes late, when its task is back.
    [(63, 4, 3, 6), (165, 3, 2, 4), (811, 4, 3, 6), (811, 3, 2, 4)],
)
def test_an_update_of_a_round_fails_while_a_task_is_away(seed: int, workers: int, ps: int, steps: int) -> None:
    ended = simulate(FaultSchedule(seed, workers, ps, steps, program=ROUNDS))
    assert not ended.broken, str(ended)


def test_steps_go_on_while_the_coordinator_is_down() -> None:
    down = Faults(kill=(Outage((COORDINATOR,), 1.0, 9.0),))
    log: list[str] = []
    ended = simulate(FaultSchedule(0, workers=1, steps=20, faults=down), log.append)
    assert not ended.broken
    assert not ended.repeated
    applied = [float(line.split()[0]) for line in log if "ps:0" in line and "applies step" in line]
    assert len(applied) == 20
    assert len([at_s for at_s in applied if 1.0 < at_s < 10.0]) >= 3


@settings(max_examples=examples(30), phases=set(Phase) - {Phase.explain})
@given(
    seed=st.integers(0, 1000),
    outages=st.lists(
        st.tuples(
            st.sampled_from(["hang=ps:0", "cut=ps:0/coordinator", "cut=ps:0/worker:0", "cut=ps:0/ps:1"]),
            st.floats(0.5, 3.0),
            # Longer than a worker may be silent; a heartbeat may have been sent 3 s before.
            st.floats(10.5, HOLDER_S - 6.0),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_no_step_fails_while_a_holder_is_paused_or_cut_off_for_less_than_its_timeout(
    seed: int, outages: list[tuple[str, float, float]]
) -> None:
    text = ",".join(f"{fault}@{at_s}+{for_s}" for fault, at_s, for_s in outages)
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_program, "STEP_S", 90.0)
        patch.setattr(tasks, "WAIT_S", 90.0)
        ended = simulate(FaultSchedule(seed, workers=2, steps=8, faults=parse_faults(text)), log.append)
    assert not ended.broken, str(ended)
    assert not ended.repeated, str(ended)
    failures = [line for line in log if "failed" in line]
    assert not failures, (str(ended), failures)


def test_the_absence_of_a_holder_and_its_return_are_announced_to_all() -> None:
    log: list[str] = []
    ended = simulate(FaultSchedule(0, workers=2, faults=parse_faults("hang=ps:0@1+14")), log.append)
    assert not ended.broken, str(ended)
    for text in ("ps:0 is away since", "ps:0 is back after"):
        hosts = [line.split()[1] for line in log if text in line]
        assert sorted(hosts) == ["coordinator", "ps:1", "worker:0", "worker:1"]


def test_a_step_that_may_have_been_applied_is_shown_with_the_reason() -> None:
    # Killed between the step's end on the ps tasks and its report.
    cut = Faults(cut=(Outage(("worker:0", COORDINATOR), 1.2, 14.0),))
    ended = simulate(FaultSchedule(0, workers=2, steps=8, faults=cut))
    assert not ended.broken
    assert [reason for repeated in ended.repeated for reason in repeated.reasons if "worker:0 was given up" in reason]
