"""Processes of benchmarks: launch a script on a local cluster of processes, or a benchmark in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Environment variable that is set where a benchmark runs with small sizes (`_tiny`).
TINY = "DFLOW_BENCH_TINY"


def launched(
    script: str, words: Sequence[str], *, ps: int, workers: int, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `script` with these arguments on `ps` and `workers` tasks; return the finished process with its output."""
    command = ["-m", "dflow", "launch", "--ps", str(ps), "--workers", str(workers), str(ROOT / "benchmarks" / script)]
    # A launched script can import modules from its own folder; the package is in the parent folder.
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
    """Run a benchmark with these arguments in a new process; return the last line that it prints."""
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
