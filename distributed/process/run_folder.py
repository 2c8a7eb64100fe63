"""The folder for files that a run's processes write without a path from the user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dflow.tracing.environment import read

RUN_FOLDER_VARIABLE = "DFLOW_RUN_DIR"


def run_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in DFLOW_RUN_DIR, else a folder of this user among the temporary files."""
    named = read(RUN_FOLDER_VARIABLE, environment)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"dflow-{os.geteuid()}"
