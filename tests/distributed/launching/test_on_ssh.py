"""`dflow launch --on ssh` with a real sshd on loopback."""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflow.__main__ import main
from dflow.distributed.launching import on_ssh
from dflow.distributed.launching.on_ssh import OnSsh
from dflow.distributed.launching.ssh_hosts import HostPart, SshHost
from dflow.distributed.launching.task_programs import TaskProgram
from dflow.distributed.process.child_process import Running
from dflow.tracing.errors import ConfigError
from tests.distributed.launching.private_sshd import IS_HERE, PrivateSshd, private_sshd
from tests.distributed.processes import CONNECT, Spawned, processes, wait_for_end
from tests.distributed.waiting import until

needs_sshd = pytest.mark.skipif(not IS_HERE, reason="sshd is not installed; the package openssh-server brings it")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSshd]:
    with private_sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def launch(sshd: PrivateSshd, folder: Path, script: str, *options: str) -> Spawned:
    (folder / "script.py").write_text(CONNECT + script)
    (folder / "hosts").write_text("a slots=2\nb slots=1\n")
    words = ("--on", "ssh", "--hosts", "hosts", "--ssh", shlex.join(sshd.ssh), "--python", str(sshd.python))
    return Spawned("-m", "dflow", "launch", *words, *options, "script.py", cwd=folder)


def everything_named(folder: Path) -> dict[int, str]:
    """Return the command lines of the processes whose working folder is this one, by process id."""
    return {pid: " ".join(words) for pid, (words, _, place) in processes().items() if place == str(folder)}


@needs_sshd
def test_a_killed_launcher_leaves_nothing_and_shows_no_secret(sshd: PrivateSshd, tmp_path: Path) -> None:
    assert main(["certs", "secret", str(tmp_path / "secret")]) == 0
    script = """
print("has", os.environ["WORD"], os.environ["NPROC"], os.environ["DFLOW_SECRET_FILE"], flush=True)
threading.Event().wait()
"""
    secured = ("--secret-file", "secret", "--env", "WORD=unseen", "--ps", "1", "--workers", "2")
    with launch(sshd, tmp_path, script, *secured) as launched:
        # The two workers of the host share its cores.
        lines = launched.read_until(f"] has unseen {max(1, len(os.sched_getaffinity(0)) // 2)} ", 2)
        assert not any(str(tmp_path) in line for line in lines)
        # The launcher and its coordinator, and for each of three tasks ssh, `ssh_task` and the program.
        until(lambda: len(everything_named(tmp_path)) == 11)
        found = everything_named(tmp_path)
        secret = (tmp_path / "secret").read_text().strip()
        assert not any(secret in line or "unseen" in line for pid, line in found.items() if pid != launched.process.pid)
        launched.process.kill()
        wait_for_end(found)


@needs_sshd
def test_tasks_are_started_again_on_their_host(sshd: PrivateSshd, tmp_path: Path) -> None:
    script = """
past = Path("past").read_text() if Path("past").exists() else ""
Path("past").write_text(past + "x")
print("start", len(past), "from", os.getppid(), flush=True)
if not past:
    os.kill(os.getpid(), signal.SIGKILL)
if past == "x":
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()
client.leave()
"""
    with launch(sshd, tmp_path, script, "--ps", "0", "--restart", "on-failure") as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "dflow: by ssh on a, the coordinator here on 127.0.0.1; " in output
    assert "worker:0 ended: killed by SIGKILL; it is started again immediately (restart 1 of 3)" in output
    assert "[worker:0] dflow: the connection to a has ended before the task" in output
    assert "worker:0 ended: killed by SIGKILL; it is started again in 1 s (restart 2 of 3)" in output
    assert (tmp_path / "past").read_text() == "xxx"


class Lines:
    def __init__(self, sshd: PrivateSshd, host: SshHost, python: str = "") -> None:
        self.lines: list[str] = []
        parts = {"/job:worker/task:0": HostPart(host, 0, 1)}
        self.place = OnSsh(parts, sshd.ssh, python or str(sshd.python), "/", is_secured=False)

    def run(self, *words: str) -> Running:
        return self.place.start(TaskProgram("/job:worker/task:0", words), self.lines.append)


def end_of(running: Running) -> int:
    until(lambda: running.poll() is not None)
    status = running.poll()
    assert status is not None
    return status


@needs_sshd
def test_a_program_runs_on_a_host_and_ends_when_asked(sshd: PrivateSshd) -> None:
    host = Lines(sshd, SshHost("a"))
    running = host.run("-c", "import signal; print('up', flush=True); signal.pause()")
    until(lambda: "up" in host.lines)
    running.terminate()
    assert end_of(running) == -signal.SIGTERM
    running = host.run("-c", "import sys; print('to stderr', file=sys.stderr); sys.exit(255)")
    assert end_of(running) == 255
    assert running.tail == ("to stderr",)
    running = host.run("-c", "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()")
    until(lambda: host.lines[-1].startswith("pid "))
    running.kill()
    assert not Path(f"/proc/{host.lines[-1].split()[1]}").exists()
    host.place.close()


@needs_sshd
def test_few_connections_to_a_host_open_at_a_time(sshd: PrivateSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ssh, "_OPENING", 1)
    host = Lines(sshd, SshHost("a"))
    first = host.run("-c", "import signal; signal.pause()")
    assert isinstance(first, on_ssh._OverSsh)
    assert not first.has_started
    second = host.run("-c", "print('second')")
    assert first.has_started, "the second one waits until the first has been started"
    assert end_of(second) == 0
    first.kill()
    host.place.close()


@needs_sshd
@pytest.mark.parametrize(
    ("host", "python", "status", "text"),
    [
        (SshHost("a"), "/nowhere/python", 127, "give --python an interpreter of that host that has dflow"),
        (SshHost("a", user="nobody-of-this-name"), "", 255, "Permission denied"),
        (SshHost("b", port=1), "", 255, "Connection refused"),
    ],
)
def test_a_host_that_cannot_start_the_task_says_why(
    sshd: PrivateSshd, host: SshHost, python: str, status: int, text: str
) -> None:
    lines = Lines(sshd, host, python)
    assert end_of(lines.run("-c", "")) == status
    assert any(re.search(text, line) for line in lines.lines), lines.lines
    lines.place.close()


@needs_sshd
def test_another_version_of_dflow_is_refused(sshd: PrivateSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ssh, "PROTOCOL_VERSION", 1)
    host = Lines(sshd, SshHost("a"))
    assert end_of(host.run("-c", "print('ran')")) == 1
    assert re.fullmatch(
        r"this host's dflow speaks protocol version \d+ and the launcher's version 1; .*", host.lines[0]
    )
    assert "ran" not in host.lines
    host.place.close()


def fake_ssh(folder: Path, script: str) -> list[str]:
    """Return a command that stands for ssh: `script` runs, but for `-G`, which finds this machine."""
    path = folder / "ssh"
    path.write_text(f'#!/bin/sh\nif [ "$1" = -G ]; then echo hostname localhost; exit; fi\n{script}\n')
    path.chmod(0o700)
    return [str(path)]


def test_an_ssh_that_does_not_read_blocks_neither_the_start_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ssh, "_END_S", 0.1)
    task = "/job:worker/task:0"
    place = OnSsh(
        {task: HostPart(SshHost("a"), 0, 1)}, fake_ssh(tmp_path, "exec sleep 1000"), "python", "/", is_secured=False
    )
    run: list[Running] = []

    def start_and_end() -> None:
        run.append(place.start(TaskProgram(task, ("-c", "0", "x" * 1_000_000)), lambda line: None))
        run[0].terminate()
        run[0].kill()

    thread = threading.Thread(target=start_and_end, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert end_of(run[0]) == -signal.SIGKILL
    until(lambda: not any(each.name == f"dflow ssh input {task}" for each in threading.enumerate()))
    place.close()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("exec sleep 1000", "-G a: expected the host's configuration within 0.1 s, got no end"),
        ("echo user me", "-G a: expected a line hostname, got none"),
    ],
)
def test_a_configuration_that_ssh_does_not_tell_is_an_error(
    script: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ssh, "_CONFIGURATION_S", 0.1, raising=False)
    path = tmp_path / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    with pytest.raises(ConfigError, match=re.escape(text)):
        OnSsh({"/job:worker/task:0": HostPart(SshHost("a"), 0, 1)}, [str(path)], "python", "/", is_secured=False)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "expected the hosts, got none"),
        (("--hosts", "hosts", "--workers", "2"), "expected slots for 2 tasks that run the script, got 1 on 1 hosts"),
        (("--hosts", "hosts", "--ssh", "no-such-ssh"), "no-such-ssh cannot be run: No such file"),
        (
            ("--hosts", "hosts"),
            "10.0.0.1 is another machine, and tasks connect to other machines only with certificates",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused_before_it_starts(
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("10.0.0.1\n")
    if "--ssh" not in words:
        # What `ssh -G` prints of this host, without the user's own configuration.
        fake = tmp_path / "ssh"
        fake.write_text("#!/bin/sh\necho hostname 10.0.0.1\n")
        fake.chmod(0o700)
        words = (*words, "--ssh", str(fake))
    assert main(["launch", "--on", "ssh", *words, "script.py"]) == 2
    assert text in capsys.readouterr().err
