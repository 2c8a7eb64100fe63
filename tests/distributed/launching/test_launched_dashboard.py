"""`dflow launch --dashboard`, with a script that uses no JAX."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dflow.__main__ import main, make_parser
from dflow.cli.certs import make_secret
from dflow.cli.launch_command import _launch_plan
from dflow.distributed.transport.security.shared_secret import SharedSecret
from tests.dflow.dashboard.http_client import Client
from tests.distributed.launching.test_launcher import children_of, launch
from tests.distributed.processes import CONNECT, wait_for_end
from tests.distributed.waiting import until

#: Reports a result, and ends when the test opens the other end of the pipe `go`.
WAITS = CONNECT + "client.ask(Report('answer', 42.0))\nopen('go').close()\nclient.leave()\n"


def test_a_launch_prints_the_address_of_its_dashboard_which_answers_until_the_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with launch(tmp_path, WAITS, options=["--dashboard"]) as launched:
        (line,) = launched.read_until("dflow: dashboard: ")
        client = Client(line.rpartition(" ")[2].strip())
        until(lambda: client.ask("/api/state").data.get("results") == {"answer": 42.0})
        state = client.ask("/api/state").data
        assert state["phase"] == "running"
        assert {task["task"]: task["state"] for task in state["tasks"]}["worker:0"] != "expected"
        children = children_of(launched.process.pid)
        assert [*map(is_dashboard, children)].count(True) == 1
        (tmp_path / "go").write_text("")
        status, output = launched.finish()
    assert status == 0, output
    assert "the dashboard ended" not in output
    wait_for_end(children)


def test_the_run_goes_on_without_a_dashboard_that_ends_and_the_logs_have_no_token(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    make_secret(tmp_path / "secret")
    script = WAITS.replace("SocketTransport()", "SocketTransport(security=SharedSecret(Path('secret')))")
    script = f"from pathlib import Path\nfrom {SharedSecret.__module__} import SharedSecret\n{script}"
    options = ["--dashboard", "--secret-file", str(tmp_path / "secret")]
    with launch(tmp_path, script, options=options) as launched:
        (line,) = launched.read_until("dflow: dashboard: ")
        address = line.rpartition(" ")[2].strip()
        assert "/?token=" in address
        client = Client(address)
        assert client.error("/api/state")[0] == 401
        token = address.partition("token=")[2]
        until(lambda: client.ask("/api/state", Authorization=f"Bearer {token}").data.get("results") != {})
        (pid,) = filter(is_dashboard, children_of(launched.process.pid))
        os.kill(pid, signal.SIGKILL)
        launched.read_until("dflow: the dashboard ended: killed by SIGKILL; the run goes on without it")
        (tmp_path / "go").write_text("")
        status, output = launched.finish()
    assert status == 0, output
    log = (tmp_path / "logs/launcher.log").read_text()
    assert "?token=..." in log
    assert token not in log


def is_dashboard(pid: int) -> bool:
    return b"dashboard" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("x", "dflow launch: address of the dashboard: expected a port or HOST:PORT, got 'x'"),
        ("0.0.0.0:0", "dflow launch: address '0.0.0.0:0' is not a loopback address, and no certificates or secret are"),
    ],
)
def test_a_wrong_address_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, text: str
) -> None:
    (tmp_path / "script.py").touch()
    assert main(["launch", f"--dashboard-port={place}", str(tmp_path / "script.py")]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--dashboard"], "0"),
        (["--dashboard-port", "8080"], "8080"),
        (["--dashboard", "--dashboard-port=0.0.0.0:0"], "0.0.0.0:0"),
        ([], ""),
    ],
)
def test_the_dashboard_is_at_a_free_port_or_the_one_of_the_option(words: list[str], place: str) -> None:
    options = make_parser().parse_args(["launch", *words, "train.py", "--dashboard"])
    plan = _launch_plan(options)
    assert (plan.dashboard, plan.script, plan.arguments) == (place, "train.py", ("--dashboard",))
