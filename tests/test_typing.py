"""A user's program has no error in pyright's strict mode. (`make types` checks the same program with mypy.)"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.once
def test_pyright_knows_the_types_of_a_users_program() -> None:
    pytest.importorskip("pyright")
    # The settings are in pyrightconfig.json; the first run downloads pyright itself from npm.
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 errors" in ran.stdout
