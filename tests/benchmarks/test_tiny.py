"""Each benchmark runs one round with small sizes, from a folder with only its clone on the path.

Most share a process, since importing JAX takes longer than a round.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._tiny import SMALL
from tests.conftest import QUICK_PYTHON

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
#: Those that take 5 s of processor time or more. The parts that they start have other tests.
LONG = {
    "billion", "checkpoint", "convnets", "copies", "dashboard", "embedding", "export_size", "keras_fit",
    "language_model", "many_variables", "many_workers", "network", "peers_training", "recovery", "replicas", "serving",
    "serving_names", "serving_tables", "soak", "startup", "sync_steps", "table_on_disk",
}  # fmt: skip
#: Benchmarks that start processes; each runs in a separate process.
ALONE = sorted({*LONG, "memory", "null_step", "step_budget"})
SHARED = ",".join(name for name in NAMES if name not in ALONE)
DEADLINE_S = 300


def test_each_benchmark_has_small_sizes() -> None:
    assert sorted(SMALL) == NAMES


@pytest.mark.once
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SHARED, id="shared"),
        *(pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in ALONE),
    ],
)
def test_a_tiny_round_ends_well(names: str) -> None:
    # PYTHONPATH may name this folder, and a launched worker has to find the benchmark without it.
    environment = {**os.environ, "PYTHONPATH": QUICK_PYTHON}
    if names == SHARED:  # two of them need two devices, a setting that JAX reads at import
        environment["JAX_NUM_CPU_DEVICES"] = "2"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks._tiny", names],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if ran.stdout.startswith(f"{names}: skipped"):
        pytest.skip(ran.stdout.strip())
    assert "dflow " in ran.stdout.splitlines()[-1]
