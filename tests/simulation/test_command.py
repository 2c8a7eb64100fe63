from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.simulation.__main__ import main


def test_a_schedule_is_simulated_with_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "3", "--faults", "kill=worker:0@0.5+1"]
    assert main([*words, "--log"]) == 0
    output = capsys.readouterr().out
    assert "seed 0, faults: kill=worker:0@0.5+1" in output
    assert "worker:0     is killed" in output
    assert "3 steps done at" in output
    assert main([*words, "--schedules", "2"]) == 0
    assert "2 schedules of 3 steps, " in capsys.readouterr().out


def test_what_the_simulated_tasks_log_is_in_the_log_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--steps", "3", "--faults", "kill=coordinator@0.5+1", "--log"]) == 0
    assert "the connection to the coordinator at coordinator#listens has ended" in capsys.readouterr().out
    assert not caplog.records


def test_faults_that_nobody_knows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--faults", "gain=1"])
    assert "fault 'gain=1': there is no fault 'gain'; give some of loss, late" in capsys.readouterr().err


def test_an_interrupt_ends_the_command() -> None:
    words = [sys.executable, "-m", "tests.simulation", "--schedules", "100000", "--log"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == -signal.SIGINT
