"""Tests that need several devices: a process with one device starts another process that has eight.

A file of such tests has a test that calls `run_there` if `HERE` is false, and its own tests if it is true.
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
    """Run test files in one process with several devices. Raises AssertionError with its output when it fails."""
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
