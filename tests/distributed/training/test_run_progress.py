"""Plans of trainers: the status shows the steps of the whole run, added up over its parts."""

from __future__ import annotations

import pytest

from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorSettings
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.training.work_messages import TrainingPlan

WORKER = "/job:worker/task:0"
COUNTS = {"fit 0-50": (50, 50), "fit 50-100": (20, 50), "run_0": (3, 9), "fit 2": (1, 4), "other 0-50": (5, 50)}


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ([], (79, 163)),
        ([(0, 1000, False)], (79, 1063)),
        ([(0, 1000, True)], (79, 133)),
        # Of a program that goes on from a checkpoint of 50 steps, whose cluster knew the run before.
        ([(50, 1000, False)], (79, 1063)),
        # A worker that was started again does not begin the run again.
        ([(0, 1000, False), (70, 1000, False)], (79, 1063)),
        ([(0, 1000, True), (70, 1000, False)], (79, 133)),
    ],
)
def test_a_part_counts_in_its_whole_run(plans: list[tuple[int, int, bool]], expected: tuple[int, int]) -> None:
    records, rows = DurableRecords(), dict[str, bytes]()
    known = RunProgress(CoordinatorCore(CoordinatorSettings(), {}, records))
    for first, total, is_over in plans:
        known.note_plan(TrainingPlan("fit", WORKER, first, total, is_over))
    assert known.steps(COUNTS) == expected
    apply_changes(rows, records.take_changes())
    again = CoordinatorCore(CoordinatorSettings(), {}, DurableRecords(rows))
    assert RunProgress(again).steps(COUNTS) == expected
