"""Each benchmark runs from a folder that only its clone has on its path, one round of it with small sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._tiny import SMALL

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
DEADLINE_S = 300


def test_each_benchmark_has_small_sizes() -> None:
    assert sorted(SMALL) == NAMES


@pytest.mark.once
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_round_ends_well(name: str) -> None:
    # PYTHONPATH may name the folder here, and a launched worker has to find it without that.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks._tiny", name],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "dflow " in ran.stdout.splitlines()[-1]
