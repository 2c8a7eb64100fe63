"""Tests of several devices, for which a process of one starts another that has as many.

A file of such tests ends with the one of `run_there` where `HERE` is false, and has its own where it is true.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax

DEVICES = 8
DEADLINE_S = 570.0
HERE = jax.device_count() >= DEVICES
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}


def run_there(*tests: str) -> None:
    """Run files of tests in one process of several devices. Raises AssertionError with what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
