"""Where the files of a run go that its processes write by themselves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

RUN_FOLDER_VARIABLE = "DFLOW_RUN_DIR"


def run_folder(environment: Mapping[str, str]) -> Path:
    """What DFLOW_RUN_DIR says, else a folder of this user's for temporary files."""
    named = environment.get(RUN_FOLDER_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"dflow-{os.geteuid()}"
