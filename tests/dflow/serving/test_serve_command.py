"""`dflow serve` as a process: its lines, its answers, and its end by SIGTERM."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.__main__ import main
from dflow.cli.serve_command import SERVE, _securities
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.policy import SameMachine
from dflow.distributed.transport.security.shared_secret import SharedSecret
from tests.dflow.serving.inference_client import infer, json_request
from tests.dflow.serving.small_exports import learner
from tests.distributed.processes import DEADLINE_S, Spawned

grpc = pytest.importorskip("grpc")


@pytest.mark.once
def test_the_command_serves_what_it_can_learns_and_saves_until_sigterm(tmp_path: Path) -> None:
    learner(tmp_path / "models" / "counter" / "4")
    dflow.export(lambda x: x * 2, dflow.spec("b, 2", jnp.float32)).save(tmp_path / "models" / "double" / "1")
    dflow.export(lambda x: x, dflow.spec("b", jnp.complex64)).save(tmp_path / "models" / "waves" / "1")
    words = ("--address", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--max-batch", "4", "--learn", "--save-every", "3600")
    with Spawned("-m", "dflow", "serve", "models", *words, cwd=tmp_path) as server:
        [refused] = server.read_until("waves is not served, and will be tried again: ", times=1)
        assert "the Open Inference Protocol has no such dtype" in refused
        [add] = [line for line in server.lines if "models/counter.add" in line]
        url = add.removeprefix("version 4 at ").partition("/v2")[0]
        assert infer(url, "counter.add", json_request(x=np.float32(3)))[1]["outputs"][0]["data"] == [3.0]
        [where] = server.read_until("gRPC at ", times=1)
        with grpc.insecure_channel(where.removeprefix("gRPC at ").strip()) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert live(b"", wait_for_ready=True, timeout=DEADLINE_S) == b"\x08\x01"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0
        server.read_until("counter: saved as version 5")
        assert not [line for line in server.lines if "traced and compiled again" in line]
    assert (tmp_path / "models" / "counter" / "5" / "manifest.json").exists()


def test_options_without_those_that_they_need_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words, remedy in (
        ("--max-delay-ms 2", "give --max-batch N"),
        ("--tables 127.0.0.1:9 --learn", "leave out one of --learn and --tables"),
        ("--cache-rows 3", "give --tables HOST:PORT"),
        ("--tables 127.0.0.1:9 --max-age 3", "give --cache-rows N"),
    ):
        assert main(["serve", "model", *words.split()]) == 1
        assert remedy in capsys.readouterr().err


def test_a_secret_is_for_the_cluster_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["certs", "secret", str(tmp_path / "secret")])
    monkeypatch.setenv("DFLOW_SECRET_FILE", str(tmp_path / "secret"))
    parser = argparse.ArgumentParser()
    SERVE.add_options(parser)
    options = parser.parse_args(["model", "--tables", "10.0.0.1:9"])
    for host, kind in (("127.0.0.1", SameMachine), ("10.0.0.2", SharedSecret)):
        security, to_cluster = _securities(options, TcpAddress(host, 8000), None)
        assert (type(security), type(to_cluster)) == (kind, SharedSecret)


def test_the_help_needs_no_server_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "Answer inference requests over HTTP and gRPC" in capsys.readouterr().out
