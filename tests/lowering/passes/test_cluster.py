from __future__ import annotations

from pathlib import Path

import pytest

from dflow.lowering.passes.cluster import FormClusters
from tests.golden import GoldenCase, golden_cases
from tests.lowering.meaning import check_pass


@pytest.mark.parametrize("case", golden_cases(Path(__file__).with_name("cluster.graphs")))
def test_golden(case: GoldenCase) -> None:
    check_pass(case, FormClusters())
