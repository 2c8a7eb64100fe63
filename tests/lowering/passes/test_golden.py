"""Each pass makes the expected graphs of its golden file, which has its name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dflow.lowering.passes.base import Pass, run_passes
from dflow.lowering.passes.schedule import schedule
from dflow.lowering.pipeline import pipeline
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.golden import GoldenCase, check, read_golden
from tests.lowering.meaning import DEVICES, TASKS, WORKER, assert_same_meaning

#: All but `choose`, which needs costs; `schedule` also for small values.
PASSES = {one.name: one for one in pipeline(WORKER, TASKS, DEVICES)}
PASSES["schedule"] = Pass("schedule", partial(schedule, least_bytes=0))
CASES = [case for name in PASSES for case in read_golden(Path(__file__).with_name(f"{name}.graphs"))]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.path.stem}: {case.name}" for case in CASES])
def test_golden(case: GoldenCase) -> None:
    graph = parse(case.input)
    verify(graph)
    made = run_passes(graph, [PASSES[case.path.stem]])
    assert text(graph) == text(parse(case.input))
    check(case, text(made))
    verify(made)
    assert_same_meaning(graph, made)
