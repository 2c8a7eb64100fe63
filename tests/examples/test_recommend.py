"""`recommend.py` from names to served answers: as processes that are killed and resumed, and under each strategy."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster
from tests.dflow.tables.test_ids_as_they_are import STRATEGIES
from tests.distributed.launching.test_resumed_launch import kill_all
from tests.distributed.processes import Spawned
from tests.examples.loading import ROOT, load
from tests.examples.test_examples import run

pytestmark = pytest.mark.once

#: Kills its process at the first call of its first function, once; the next process waits at its second checkpoint.
FAULTY = f"""
import os, pathlib, runpy, signal
from dflow.tracing import moments

seen = []

def reached(moment, task):
    seen.append(moment)
    if moment == "first call" and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if seen.count("save") == 2 and not pathlib.Path("waited").exists():
        pathlib.Path("waited").touch()
        print("waits at the second checkpoint", flush=True)
        signal.pause()

moments.hook = reached
runpy.run_path({str(ROOT / "examples" / "recommend.py")!r}, run_name="__main__")
"""
PRINTED = re.compile(r"AUC (\d\.\d+) odds \[(.*), (.*)\]")


def printed(output: str) -> tuple[float, list[float]]:
    """Return the AUC and the odds that the example has printed."""
    [(auc, *odds)] = PRINTED.findall(output)
    return float(auc), [*map(float, odds)]


@pytest.mark.timeout(400)
def test_a_killed_job_is_resumed_and_its_model_answers_names_over_http_and_grpc(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    (tmp_path / "train.py").write_text(FAULTY)
    options = ("--restart", "on-failure", "--snapshots", "snapshots", "--snapshot-every", "1")
    words = ("-m", "dflow", "launch", "--ps", "2", "--workers", "1", *options, "train.py", "--steps", "150")
    with Spawned(*words, cwd=tmp_path) as launched:
        launched.read_until("waits at the second checkpoint")
        kill_all(launched)
    assert (tmp_path / "killed").exists()
    with Spawned(*words, cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "the job goes on from snapshot" in output
    found = re.search(r"\n worker:0 .* finished +(\d+) ", output)
    assert found, output
    assert 0 < int(found[1]) < 150  # the others were in the snapshot, or in the first checkpoint
    auc, odds = printed(output)
    assert auc > 0.85
    addresses = ("--address", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    with Spawned("-m", "dflow", "serve", "run/model", *addresses, cwd=tmp_path) as server:
        [grpc] = server.read_until("gRPC at ")
        [http] = re.findall(r"http://(\S+?)/v2", "".join(server.lines))
        asked = ("user-3", "film-7", "nobody", "film-8")
        answers = run("examples/clients/recommend.py", http, grpc.removeprefix("gRPC at ").strip(), *asked)
    by_http, by_grpc = (np.fromstring(line.strip("[]"), sep=",") for line in answers.splitlines())
    np.testing.assert_allclose(by_http, odds, atol=1e-6)
    np.testing.assert_allclose(by_grpc, odds, atol=1e-6)


@pytest.mark.parametrize("kind", ["sync", "hybrid"])
def test_a_strategy_trains_and_exports_it(kind: str, tmp_path: Path, capsys: Any) -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        load("recommend").train(worker, STRATEGIES[kind](worker), tmp_path, 100)
    auc, odds = printed(capsys.readouterr().out)
    assert auc > 0.8
    loaded = dflow.load(tmp_path / "model")
    np.testing.assert_allclose(loaded(["user-3", "nobody"], ["film-7", "film-8"]), odds, atol=1e-6)
    assert (tmp_path / "checkpoints" / "step_99").is_dir()
