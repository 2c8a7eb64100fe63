"""Each pass makes the expected graphs of its golden file, which has its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflow.lowering.passes.schedule import Schedule
from dflow.lowering.pipeline import pipeline
from tests.golden import GoldenCase, read_golden
from tests.lowering.meaning import DEVICES, TASKS, WORKER, check_pass

#: All but `choose`, which needs costs; `schedule` also for small values.
PASSES = {one.name: one for one in (*pipeline(WORKER, TASKS, DEVICES), Schedule(least_bytes=0))}
CASES = [case for name in PASSES for case in read_golden(Path(__file__).with_name(f"{name}.graphs"))]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.path.stem}: {case.name}" for case in CASES])
def test_golden(case: GoldenCase) -> None:
    check_pass(case, PASSES[case.path.stem])
