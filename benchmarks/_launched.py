"""Processes of benchmarks: launch a script on a local cluster of processes, or a benchmark in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Environment variable that is set where a benchmark runs with small sizes (`_tiny`).
TINY = "DFLOW_BENCH_TINY"


def launched(
    script: str, words: Sequence[str], *, ps: int, workers: int, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `script` with these arguments on `ps` and `workers` tasks; return the finished process with its output."""
    command, environment = launch(script, words, ps=ps, workers=workers)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def launch(script: str, words: Sequence[str], *options: str, ps: int, workers: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that launches `script` on `ps` and `workers` tasks, and its environment."""
    cluster = ["--ps", str(ps), "--workers", str(workers), *options]
    # A launched script can import modules from its own folder; the package is in the parent folder.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    script = str(ROOT / "benchmarks" / script)
    return [sys.executable, "-m", "dflow", "launch", *cluster, script, *words], {**os.environ, "PYTHONPATH": path}


def figures_in(output: str) -> dict[str, Any]:
    """Return the figures that a run printed as JSON after the word `measured`."""
    for line in output.splitlines():
        _, found, printed = line.partition("measured ")
        if found:
            figures: dict[str, Any] = json.loads(printed)
            return figures
    raise SystemExit(f"the run failed:\n{output}")


def processes(launcher: int) -> dict[str, int]:
    """Return the processes that a launcher has started, by role, such as `ps:0`."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return {_role(int(child)): int(child) for child in children}


def _role(process: int) -> str:
    words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    if "coordinator" in words:
        return "coordinator"
    if "task" in words:
        return f"ps:{words[words.index('--index') + 1]}"
    environment = Path(f"/proc/{process}/environ").read_text().split("\0")
    index = next(entry for entry in environment if entry.startswith("DFLOW_INDEX="))
    return f"worker:{index.partition('=')[2]}"


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
