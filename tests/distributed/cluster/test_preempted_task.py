"""SIGTERM to a parameter task in the middle of a run: it comes back with all of its state, and no step is repeated."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.counting_script import COUNTERS, REPORT
from tests.distributed.processes import Spawned, children

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

# Enough steps: the first snapshot and each of two losses may take the time of a thousand.
SCRIPT = (
    COUNTERS
    + """
def batches():
    for number in range(10**6):
        if number % 50 == 0:
            print(f"at batch {number}", flush=True)
        yield jnp.float32(1.0)

done = sum(1 for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=5000))
cluster.report(f"done by {cluster.index}", done)
"""
    + REPORT
)


def task(launched: Spawned, name: str) -> int:
    """The process of a parameter task, by its index."""
    found = children(launched.process.pid)
    [pid] = [pid for pid, words in found.items() if "task" in words and words[words.index("--index") + 1] == name]
    return pid


def test_no_update_is_lost_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--restart", "ps=on-failure", "--snapshots", "snapshots", "--snapshot-every", "3600", "train.py"]
    with Spawned(
        "-m", "dflow", "launch", "--all-tables", "--ps", "2", "--workers", "2", *words, cwd=tmp_path
    ) as launched:
        launched.read_until("the first snapshot, of 2 variables, is complete")
        for index in range(2):
            launched.read_until("at batch", times=len([line for line in launched.lines if "at batch" in line]) + 4)
            os.kill(task(launched, str(index)), signal.SIGTERM)
            launched.read_until("returned to snapshot", times=index + 1)
        status, output = launched.finish()
    assert status == 0, output
    for index in range(2):
        assert f"ps:{index} ended: killed by SIGTERM; it is started again" in output, output
        assert re.search(rf"ps:{index} leaves: snapshot \d+ has all state", output), output
    assert len(re.findall(r"ps:0, ps:1 returned to snapshot \d+; 0 steps are done again", output)) == 2, output
    assert re.search(r"\n count +5000 ", output), output
    assert re.search(r"\n other +5000 ", output), output
    assert sum(map(int, re.findall(r"\n done by \d +(\d+) ", output))) == 5000, output
