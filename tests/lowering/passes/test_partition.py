from __future__ import annotations

from pathlib import Path

import pytest

from dflow.lowering.passes.partition import Partition
from tests.golden import GoldenCase, golden_cases
from tests.lowering.meaning import WORKER, check_pass


@pytest.mark.parametrize("case", golden_cases(Path(__file__).with_name("partition.graphs")))
def test_golden(case: GoldenCase) -> None:
    check_pass(case, Partition(WORKER))
