from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from dflow.lowering.passes.base import run_passes
from dflow.lowering.passes.place import Place
from dflow.lowering.passes.repeat import Repeat
from dflow.tracing.syntax.verify import verify
from tests.effort import examples
from tests.golden import GoldenCase, golden_cases
from tests.graphs_ import Case, cases
from tests.lowering.meaning import TASKS, WORKER, assert_same_meaning, check_pass


@pytest.mark.parametrize("case", golden_cases(Path(__file__).with_name("repeat.graphs")))
def test_golden(case: GoldenCase) -> None:
    check_pass(case, Repeat())


@settings(max_examples=examples(9))
@given(case=cases(devices=TASKS))
def test_a_traced_program_keeps_its_meaning(case: Case) -> None:
    placed = run_passes(case.graph, [Place(WORKER, TASKS)])
    repeated = Repeat()(placed)
    verify(repeated)
    assert_same_meaning(placed, repeated, case.inputs, case.state)
