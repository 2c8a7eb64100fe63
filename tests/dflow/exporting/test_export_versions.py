"""Exports written by older versions still load. `exports/make.py` writes one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dflow

#: They were written on a CPU, for GPUs and TPUs too.
pytestmark = pytest.mark.device

FOLDER = Path(__file__).parent / "exports"
MADE = sorted(path.name for path in FOLDER.glob("jax*"))


def steps() -> Any:
    """Arguments of the calls of each export when it was written."""
    spec = importlib.util.spec_from_file_location("make_exports", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.STEPS


@pytest.mark.parametrize("made", MADE)
def test_an_export_of_an_older_version_gives_what_it_gave_when_it_was_made(made: str) -> None:
    there = dflow.load(FOLDER / made, prefix=f"{made}/")
    expected = json.loads((FOLDER / made / "expected.json").read_text())
    got = [jax.tree.map(lambda array: np.asarray(array).tolist(), there.step(given)) for given in steps()]
    assert got == expected
    assert not there.variables["count"].trainable
