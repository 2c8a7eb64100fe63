from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.simulation.__main__ import main


def test_a_schedule_is_simulated_with_its_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--steps", "3", "--faults", "kill=coordinator@0.5+1"]
    assert main([*words, "--log"]) == 0
    output = capsys.readouterr().out
    assert "seed 0, faults: kill=coordinator@0.5+1" in output
    assert "coordinator  is killed" in output
    assert "the connection to the coordinator at coordinator#listens has ended" in output
    assert "3 steps done at" in output
    assert not caplog.records, "what simulated tasks log is in the log of the schedule alone"
    assert main([*words, "--schedules", "2"]) == 0
    assert "2 schedules of 3 steps, " in capsys.readouterr().out


def test_an_interrupt_ends_the_command() -> None:
    words = [sys.executable, "-m", "tests.simulation", "--schedules", "100000", "--log"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == -signal.SIGINT
