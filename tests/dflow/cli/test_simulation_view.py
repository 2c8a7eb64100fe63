from __future__ import annotations

import pytest

from dflow.__main__ import main


def test_a_schedule_is_simulated_with_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--steps", "3", "--faults", "kill=worker:0@0.5+1"]
    assert main([*words, "--log"]) == 0
    output = capsys.readouterr().out
    assert "seed 0, faults: kill=worker:0@0.5+1" in output
    assert "worker:0     is killed" in output
    assert "3 steps done at" in output
    assert main([*words, "--schedules", "2"]) == 0
    assert "2 schedules of 3 steps, " in capsys.readouterr().out


def test_faults_that_nobody_knows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--faults", "gain=1"]) == 1
    assert capsys.readouterr().err.startswith(
        "dflow simulate: fault 'gain=1': there is no fault 'gain'; give some of loss, late"
    )


def test_simulate_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help"])
    assert "usage: dflow simulate" in capsys.readouterr().out
