"""Processes of benchmarks: a script launched on a cluster of processes here, and a benchmark in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Set where a benchmark runs with small sizes (`_tiny`).
TINY = "DFLOW_BENCH_TINY"


def launched(
    script: str, words: Sequence[str], *, ps: int, workers: int, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `script` with these words on `ps` and `workers` tasks; how it ended, and its output."""
    command = ["-m", "dflow", "launch", "--ps", str(ps), "--workers", str(workers), str(ROOT / "benchmarks" / script)]
    # A launched script finds what lies beside it, and this folder is beside the package, not in it.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *command, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def last_line_of(name: str, words: Sequence[str], *, timeout_s: float, **environment: str) -> str:
    """Run a benchmark with these words in a new process; the last line that it prints."""
    module = ["benchmarks._tiny", name] if TINY in os.environ else [f"benchmarks.{name}"]
    ran = subprocess.run(
        [sys.executable, "-m", *module, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    return ran.stdout.splitlines()[-1]
