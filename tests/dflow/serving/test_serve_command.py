"""`dflow serve` as a process: its lines, its answers, and its end by SIGTERM."""

from __future__ import annotations

import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.__main__ import main
from tests.dflow.serving.inference_client import infer, json_request
from tests.dflow.serving.small_exports import learner
from tests.distributed.processes import DEADLINE_S, Spawned


@pytest.mark.once
def test_the_command_serves_what_it_can_and_prints_no_advice_on_training(tmp_path: Path) -> None:
    dflow.export(lambda x: x * 2, dflow.spec("b, 2", jnp.float32)).save(tmp_path / "models" / "double")
    dflow.export(lambda x: x, dflow.spec("b", jnp.complex64)).save(tmp_path / "models" / "waves")
    words = ("-m", "dflow", "serve", "models", "--address", "127.0.0.1:0", "--max-batch", "4")
    with Spawned(*words, cwd=tmp_path) as server:
        [refused] = server.read_until("waves is not served, and will be tried again: ", times=1)
        assert "the Open Inference Protocol has no such dtype" in refused
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0
        assert not [line for line in server.lines if "traced and compiled again" in line]


@pytest.mark.once
def test_the_command_serves_learns_and_saves_until_sigterm(tmp_path: Path) -> None:
    learner(tmp_path / "counter" / "4")
    words = ("-m", "dflow", "serve", "counter", "--address", "127.0.0.1:0", "--learn", "--save-every", "3600")
    with Spawned(*words, cwd=tmp_path) as server:
        add, total = server.read_until("version 4 at http://127.0.0.1:", times=2)
        assert (add.split("/")[-1].strip(), total.split("/")[-1].strip()) == ("counter.add", "counter.total")
        url = add.split(" at ")[1].partition("/v2")[0]
        assert infer(url, "counter.add", json_request(x=np.float32(3)))[1]["outputs"][0]["data"] == [3.0]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0
        server.read_until("counter: saved as version 5")
    assert (tmp_path / "counter" / "5" / "manifest.json").exists()


def test_the_help_needs_no_server_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "Answer inference requests over HTTP" in capsys.readouterr().out
