"""A launch whose processes were all killed, started again by the same command: it goes on from the newest snapshot."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.counting_script import COUNTERS, REPORT, await_snapshot
from tests.distributed.processes import Spawned, children, wait_for_end

# Several starts of a cluster; each is slow on a busy machine.
pytestmark = [pytest.mark.once, pytest.mark.timeout(400)]

ASYNC = (
    COUNTERS
    + """
def batches():
    for number in range(10**6):
        yield jnp.float32(1.0)

for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=3000):
    pass
"""
    + REPORT
)


def launch(folder: Path) -> Spawned:
    words = ("--ps", "2", "--workers", "2", "--snapshots", "snapshots", "--snapshot-every", "0.5", "train.py")
    return Spawned("-m", "dflow", "launch", "--all-tables", *words, cwd=folder)


def kill_all(launched: Spawned) -> None:
    """Kill the launcher and all of its processes at the same time."""
    found = children(launched.process.pid)
    for pid in (launched.process.pid, *found):
        os.kill(pid, signal.SIGKILL)
    wait_for_end(found)


def test_an_asynchronous_run_does_each_step_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASYNC)
    with launch(tmp_path) as launched:
        launched.read_until("the first snapshot")
        await_snapshot(tmp_path)
        kill_all(launched)
    with launch(tmp_path) as launched:
        status, output = launched.finish()
    assert status == 0, output
    found = re.search(r"the job goes on from snapshot (\d+), with (\d+) steps done", output)
    assert found, output
    assert 0 < int(found[2]) <= 3000
    assert "Steps: 3000 of 3000" in output
    assert re.search(r"\n count +3000 ", output), output
    assert re.search(r"\n other +3000 ", output), output
