import signal
import socket
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from dflow import __version__
from dflow.__main__ import main
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.coordinator import LISTENING
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import GetStatus
from dflow.lowering.values.wide_types import admit
from tests.distributed.detection.recorded import indexed_job
from tests.distributed.processes import Spawned


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dflow {__version__}\n"


@pytest.mark.parametrize("command", ["launch", "task", "coordinator", "status", "trace", "dump", "where"])
def test_each_command_says_what_it_is_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert command in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: dflow {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch", "--workers", "0", "x.py"], "0 is too few; give 1 or more"),
        (["launch", "--ps", "-1", "x.py"], "-1 is negative; give 0 or more"),
        (["launch", "--workers", "two", "x.py"], "argument --workers: expected an integer, got 'two'"),
        (["launch", "--wokers", "2", "x.py"], "unrecognized argument --wokers; did you mean --workers?"),
        (["serve", "--max-batch", "0", "model"], "0 is too few; give 1 or more"),
        (["coordinator", "--job", "ps"], "'ps' is not of the form NAME=N, such as ps=2"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert text in capsys.readouterr().err


def test_status_shows_a_running_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = make_coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 2})
    client = CoordinatorClient(SocketTransport(), coordinator.address, name="/job:ps/task:0")
    client.join("/job:ps/task:0", "here:1")
    assert main(["status", "--coordinator", coordinator.address]) == 0
    output = capsys.readouterr().out
    assert "1 of 2 tasks are up; waiting for ps:1" in output
    assert "Tasks" in output
    up = {task: main(["status", "--up", task, "--coordinator", coordinator.address]) for task in ("ps:0", "ps:1")}
    assert up == {"ps:0": 0, "ps:1": 1}
    client.close()
    assert main(["status", "--up", "coordinator", "--coordinator", coordinator.address]) == 0
    coordinator.close()
    assert capsys.readouterr().out == ""


def test_an_error_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--coordinator", "nonsense"]) == 1
    assert capsys.readouterr().err.startswith("dflow status: address 'nonsense' is not of the form 'host:port'")


def test_a_coordinator_says_first_where_it_listens_and_ends_quietly_at_sigterm(tmp_path: Path) -> None:
    with Spawned("-m", "dflow", "coordinator", "--job", "ps=1", cwd=tmp_path) as spawned:
        [line] = spawned.read_until(LISTENING)
        assert spawned.lines == [line]
        client = CoordinatorClient(SocketTransport(), line.removeprefix(LISTENING).strip(), name="tool")
        assert client.ask(GetStatus()).expected == ("/job:ps/task:0",)
        client.close()
        spawned.process.send_signal(signal.SIGTERM)
        assert spawned.finish() == (0, line)


@pytest.mark.parametrize(
    ("words", "end"), [("task --snapshots . --index 0 --coordinator", 143), ("serve . --tables", 0)]
)
def test_a_wait_for_a_coordinator_ends_at_sigterm(words: str, end: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with Spawned("-m", "dflow", *words.split(), where, cwd=tmp_path) as spawned:
            silent.accept()[0].close()
            spawned.process.send_signal(signal.SIGTERM)
            assert spawned.finish() == (end, "")


@pytest.mark.parametrize("command", ["coordinator", "task"])
def test_an_address_that_is_taken_is_said_with_the_remedy(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(make_coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 1})) as there:
        words = ["--index", "0", "--coordinator", there.address] if command == "task" else []
        assert main([command, "--address", there.address, *words]) == 1
        said = capsys.readouterr().err
        assert f"dflow {command}: cannot listen at {there.address}, for another process does" in said
        assert "--address HOST:PORT" in said
    admit([np.float64])
    assert not jax.config.read("jax_enable_x64"), "a task that could not start has left its settings"


def test_a_trace_for_a_folder_that_is_not_there_is_refused_before_anything_is_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "trace.json"
    assert main(["trace", "--coordinator", "127.0.0.1:1", "--out", str(out)]) == 1
    assert f"there is no folder {out.parent} for trace.json" in capsys.readouterr().err


def test_where_says_what_was_found_and_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in indexed_job(1, DFLOW_SERVICE="dflow", DFLOW_WORKERS="4").items():
        monkeypatch.setenv(name, value)
    assert main(["where"]) == 0
    output = capsys.readouterr().out
    assert "- Slurm: no Slurm job: SLURM_JOB_ID is not set" in output
    assert "+ Kubernetes: pod 1 of 4 behind the Service dflow" in output
    assert "This process is worker:1 of the cluster with its coordinator at train-0.dflow:7711" in output
    monkeypatch.delenv("DFLOW_WORKERS")
    assert main(["where"]) == 1
    assert "dflow where: Kubernetes: DFLOW_WORKERS is not set" in capsys.readouterr().err


def test_a_cluster_file_serves_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    file = tmp_path / "cluster.toml"
    file.write_text(f'coordinator = "{address}"\n[jobs]\nps = ["127.0.0.1", "127.0.0.2"]\n')
    with (
        Spawned("-m", "dflow", "coordinator", "--cluster", str(file), cwd=tmp_path) as coordinator,
        Spawned("-m", "dflow", "task", "--job", "ps", "--index", "1", cwd=tmp_path, DFLOW_CLUSTER=str(file)) as task,
    ):
        [line] = coordinator.read_until(LISTENING)
        assert line == f"{LISTENING}{address}\n"
        client = CoordinatorClient(SocketTransport(), address, name="/job:ps/task:0", timeout_s=60)
        client.join("/job:ps/task:0", "here:1")
        client.wait_for_tasks(["/job:ps/task:1"], timeout_s=60)
        assert main(["status", "--cluster", str(file)]) == 0
        client.close()
        task.process.send_signal(signal.SIGTERM)
        assert task.finish() == (0, "")
    assert "2 of 2 tasks are up" in capsys.readouterr().out


def test_a_task_that_is_told_of_no_coordinator_says_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task", "--index", "0"]) == 1
    assert (
        "dflow task: where is the coordinator? give --coordinator HOST:PORT or --cluster FILE"
        in capsys.readouterr().err
    )
