"""`clicks_from_parquet.py`, killed and resumed: each row of its files is used once an epoch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching.test_resumed_launch import kill_all
from tests.distributed.processes import Spawned
from tests.examples.loading import ROOT
from tests.examples.test_examples import printed

pytestmark = pytest.mark.once
pytest.importorskip("pyarrow")

#: Kills the reader 0 once, at its tenth batch, and all processes wait at the third checkpoint once.
FAULTY = f"""
import os, pathlib, runpy, signal
from dflow.distributed.training import served_batches
from dflow.tracing import moments

seen, form = [], served_batches._form

def formed(batch, arrays):
    seen.append("array")
    if os.environ["DFLOW_JOB"] == "reader" and len(seen) == 90 and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return form(batch, arrays)

def reached(moment, task):
    seen.append(moment)
    if seen.count("save") == 3 and not pathlib.Path("waited").exists():
        pathlib.Path("waited").touch()
        print("waits at the third checkpoint", flush=True)
        signal.pause()

served_batches._form, moments.hook = formed, reached
runpy.run_path({str(ROOT / "examples" / "clicks_from_parquet.py")!r}, run_name="__main__")
"""
ENDED = re.compile(r"(\d+) steps: AUC (\d\.\d+); each row was used \[(.*)\] times")


def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ("--rows", "10000", "--batch", "100", "--folder", str(tmp_path), "--epochs", "2")
    [(steps, auc, times)] = ENDED.findall(printed("clicks_from_parquet", *words, patch=monkeypatch, output=capsys))
    assert (steps, times) == ("200", "2")
    assert float(auc) > 0.55


@pytest.mark.long
@pytest.mark.timeout(400)
def test_readers_and_workers_that_are_killed_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAULTY)
    options = ("--ps", "1", "--workers", "2", "--job", "reader=2", "--restart", "reader=on-failure")
    words = ("-m", "dflow", "launch", *options, "train.py", "--rows", "20000", "--batch", "100", "--every", "20")
    with Spawned(*words, cwd=tmp_path) as launched:
        launched.read_until("waits at the third checkpoint")
        kill_all(launched)
    assert (tmp_path / "killed").exists()
    with Spawned(*words, cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 0, output
    [(steps, auc, times)] = ENDED.findall(output)
    assert (steps, times) == ("200", "1")
    assert float(auc) > 0.55
