"""The examples as a user starts them, with few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.processes import Spawned

ROOT = Path(__file__).resolve().parents[2]
ACCURACY = re.compile(r"test accuracy (\d\.\d{4}) on 359 held-out images")


def accuracy(output: str) -> float:
    """Return the printed accuracy."""
    [found] = ACCURACY.findall(output)
    return float(found)


@pytest.mark.once
def test_digits_in_one_process() -> None:
    with Spawned("examples/digits.py", "--steps", "60", cwd=ROOT) as ran:
        status, output = ran.finish()
    assert status == 0, output
    assert accuracy(output) > 0.6


@pytest.mark.once
def test_digits_on_a_cluster() -> None:
    words = ("-m", "dflow", "launch", "--ps", "1", "--workers", "2", "examples/digits.py", "--steps", "60")
    with Spawned(*words, cwd=ROOT) as ran:
        status, output = ran.finish()
    assert status == 0, output
    assert accuracy(output) > 0.5
    assert "Steps: 60 of 60" in output
    assert re.search(r"\n grad/conv1/\w+\+7 +worker:\* -> ps:0 ", output), output
    assert re.search(r"\n test accuracy +0\.\d+", output), output
    assert re.search(r"\n Variables: 25, ", "\n " + output.replace("\n", "\n ")), output


@pytest.mark.once
def test_actors_and_a_learner() -> None:
    # With garbage collection at exit, as in a user's process.
    with Spawned("examples/actor_learner.py", cwd=ROOT, PYTHONPATH="") as ran:
        status, output = ran.finish()
    assert status == 0, output
    assert "learned from 6400 transitions of 4 actors; 0 are left" in output
    assert "the goal is 7 steps away" in output


@pytest.mark.once
def test_actors_and_a_learner_on_a_cluster() -> None:
    words = ("-m", "dflow", "launch", "--workers", "2", "--job", "learner=1", "examples/actor_learner.py")
    with Spawned(*words, "--actors", "2", "--steps", "160", cwd=ROOT) as ran:
        status, output = ran.finish()
    assert status == 0, output
    assert "[learner:0] learned from 320 transitions of 2 actors; 0 are left" in output
    assert re.search(r"\n transitions_2\+3 +ps:0 -> learner:0 +10 +40 ", output), output


@pytest.mark.once
@pytest.mark.parametrize("words", [["--plain"], []])
def test_a_pallas_kernel_trains_as_the_plain_function_does(words: list[str]) -> None:
    with Spawned("examples/pallas_kernel.py", "--steps", "12", *words, cwd=ROOT) as ran:
        status, output = ran.finish()
    assert status == 0, output
    assert ("cpu fused_cross_entropy: run, values differ by " in output) != bool(words), output
    assert re.search(r"tpu fused_cross_entropy: interpreted, values differ by .*, gradients differ by ", output)
    first, last = re.findall(r"loss (\d\.\d{4}), after 12 steps (\d\.\d{4})", output)[0]
    assert float(last) < 0.6 * float(first)
