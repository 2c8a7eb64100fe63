"""A process of each role ends at each named moment: the run is done, and no invariant is broken."""

from __future__ import annotations

import pytest

from tests.effort import examples
from tests.simulation.fault_schedule import FaultSchedule, simulate
from tests.simulation.faults import COORDINATOR, AtMoment, Faults, Outage, parse_faults
from tests.simulation.programs import ROUND_SNAPSHOTS, SNAPSHOTS

pytestmark = pytest.mark.once

#: The moments that a simulated process reaches; the others are those of whole programs.
MOMENTS = ("creation", "registration", "capture", "write", "commit", "restore")
HOSTS = (COORDINATOR, "ps:0", "worker:0")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("host", HOSTS)
def test_a_process_ends_at_a_moment(moment: str, host: str) -> None:
    before = (Outage(("ps:1",), 2.5, 0.5),) if moment == "restore" else ()
    for number in range(examples(2)):
        faults = Faults(at=(AtMoment(moment, 1 + number, host, 0.7),), kill=before)
        # Rounds register no plans of their own.
        program = ROUND_SNAPSHOTS if number % 2 and moment != "registration" else SNAPSHOTS
        ended = simulate(FaultSchedule(number, steps=6 if program == SNAPSHOTS else 4, faults=faults, program=program))
        assert not ended.broken, str(ended)
        assert ended.at_moments, f"{faults} did not come: {ended}"


@pytest.mark.parametrize("program", [SNAPSHOTS, ROUND_SNAPSHOTS])
@pytest.mark.parametrize(
    "faults",
    [
        "full=coordinator@1+6",
        "full=coordinator@2+9,kill=ps:0@4+0.5",
        "full=coordinator@0+5,kill=ps:1@2+0.5,kill=worker:0@3+1",
        "full=coordinator@1+9,kill=coordinator@5+0.5,kill=ps:0@6+0.5",
        # It forgets steps that it has given to workers, and gives them to others.
        "full=coordinator@2+3,kill=coordinator@4+0.5",
    ],
)
def test_the_coordinator_cannot_write_for_a_while(program: str, faults: str) -> None:
    ended = simulate(FaultSchedule(0, steps=6, faults=parse_faults(faults), program=program))
    assert not ended.broken, str(ended)
