"""The examples with few steps: as a user starts them, or, to save the start of a process, in this one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflow.lowering.files.array_files import read_arrays
from tests.distributed.processes import Spawned
from tests.examples.loading import ROOT, load

pytestmark = pytest.mark.once

ACCURACY = re.compile(r"test accuracy (\d\.\d{4}) on 359 held-out images")
PERPLEXITY = re.compile(r"perplexity (.*) on \d+ held-out words; by the frequency of words (.*)\n")


def run(*words: str, **environment: str) -> str:
    """Run Python with these words; return what it has printed. Raises AssertionError if it fails."""
    with Spawned(*words, cwd=ROOT, **environment) as ran:
        status, output = ran.finish()
    assert status == 0, output
    return output


def launch(*words: str) -> str:
    """Run `dflow launch` with these words; return what it has printed."""
    return run("-m", "dflow", "launch", "--all-tables", *words)


def accuracy(output: str) -> float:
    """Return the printed accuracy."""
    [found] = ACCURACY.findall(output)
    return float(found)


def test_digits_on_a_cluster() -> None:
    output = launch("--ps", "1", "--workers", "2", "examples/digits.py", "--steps", "60")
    assert accuracy(output) > 0.5
    assert "Steps: 60 of 60" in output
    assert re.search(r"\n grad/conv1/\w+\+7 +worker:\* -> ps:0 ", output), output
    assert re.search(r"\n test accuracy +0\.\d+", output), output
    assert re.search(r"\n Variables: 25, ", "\n " + output.replace("\n", "\n ")), output


def test_actors_and_a_learner() -> None:
    # With garbage collection at exit, as in a user's process.
    output = run("examples/actor_learner.py", PYTHONPATH="")
    assert "learned from 6400 transitions of 4 actors; 0 are left" in output
    assert "the goal is 7 steps away" in output


@pytest.mark.long
def test_actors_and_a_learner_on_a_cluster() -> None:
    options = ("--actors", "2", "--steps", "160")
    output = launch("--workers", "2", "--job", "learner=1", "examples/actor_learner.py", *options)
    assert "[learner:0] learned from 320 transitions of 2 actors; 0 are left" in output
    assert re.search(r"\n transitions_2\+3 +ps:0 -> learner:0 +10 +40 ", output), output


@pytest.mark.parametrize("words", [pytest.param(["--plain"], marks=pytest.mark.long), []])
def test_a_pallas_kernel_trains_as_the_plain_function_does(words: list[str]) -> None:
    output = run("examples/pallas_kernel.py", "--steps", "12", *words)
    assert ("cpu fused_cross_entropy: run, values differ by " in output) != bool(words), output
    assert re.search(r"tpu fused_cross_entropy: interpreted, values differ by .*, gradients differ by ", output)
    first, last = re.findall(r"loss (\d\.\d{4}), after 12 steps (\d\.\d{4})", output)[0]
    assert float(last) < 0.6 * float(first)


def printed(name: str, *words: str, patch: pytest.MonkeyPatch, output: Any) -> str:
    """Run an example's `main` in this process, with these arguments; return what it has printed."""
    example = load(name)
    patch.setattr("sys.argv", [f"{name}.py", *words])
    example.main()
    shown: str = output.readouterr().out
    return shown


def numbers(pattern: str | re.Pattern[str], output: str) -> list[float]:
    """Return the numbers that the groups of `pattern` have in the output."""
    found = re.search(pattern, output)
    assert found is not None, output
    return [float(number) for number in found.groups()]


def test_a_factorisation_fills_in_hidden_pixels(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    output = printed("factorisation", "--steps", "400", patch=monkeypatch, output=capsys)
    error, of_means = numbers(r"error (.*) on 11500 hidden pixels; of the mean of each pixel (.*)\n", output)
    assert error < 0.9 * of_means


def test_a_generator_makes_pictures_like_digits(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    output = printed("generator", "--steps", "500", patch=monkeypatch, output=capsys)
    before, now, real = numbers(r"digit: (.*) at first, (.*) now, (.*) of real digits\n", output)
    assert real < now < 0.7 * before


def test_restored_layers_help_to_learn_from_few_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Any
) -> None:
    output = printed("fine_tune", "--steps", "100", "--folder", str(tmp_path), patch=monkeypatch, output=capsys)
    assert "restored first/body/dense1/bias first/body/dense1/kernel first/body/dense2/bias" in output
    assert "head" not in output
    assert numbers(r"which digit: accuracy (.*)\n", output)[0] > 0.9
    restored, random = numbers(r"accuracy (.*) with the restored layers, (.*) with random ones\n", output)
    assert restored > random + 0.03


def test_actors_and_a_learner_balance_poles(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    output = printed("cartpole", "--updates", "100", patch=monkeypatch, output=capsys)
    [steps] = numbers(r"100 updates; a pole stays up for (.*) steps\n", output)
    assert steps > 60  # by chance 20


def test_a_language_model_trains_by_the_full_softmax(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ("--steps", "60", "--vocabulary", "200")
    output = printed("language_model", *words, patch=monkeypatch, output=capsys)
    perplexity, by_frequency = numbers(PERPLEXITY, output)
    assert perplexity < 0.9 * by_frequency


@pytest.mark.long
def test_a_language_model_on_a_cluster_trains_by_the_sampled_softmax() -> None:
    options = ("--steps", "100", "--vocabulary", "200", "--softmax", "sampled")
    output = launch("--ps", "2", "--workers", "1", "examples/language_model.py", *options)
    perplexity, by_frequency = numbers(PERPLEXITY, output)
    assert perplexity < 0.9 * by_frequency
    assert re.search(r"\n softmax/[01] +f32\[100,64\] ", output), output
    assert numbers(r"100 steps done here, loss .*, (\d+) words/s", output)[0] > 0


@pytest.mark.long
def test_an_image_classifier_on_two_processes_equals_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    options = ("--steps", "30", "--batch", "32", "--save")
    alone = printed("image_classifier", *options, str(tmp_path / "alone"), patch=monkeypatch, output=capsys)
    words = ("--ps", "0", "--workers", "2", "examples/image_classifier.py", *options, str(tmp_path / "together"))
    output = launch(*words)
    assert accuracy(alone) > 0.8
    assert set(ACCURACY.findall(output)) == set(ACCURACY.findall(alone))
    one, two = (read_arrays(tmp_path / name) for name in ("alone", "together"))
    expected, found = (files.read(dict.fromkeys(files.types)) for files in (one, two))
    assert len(expected) == 12
    # The statistics of the batch normalization among them, whose batch is that of both processes.
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_click_through_in_one_process() -> None:
    output = run("examples/click_through.py", "--steps", "300")
    [(found, best, logloss)] = re.findall(r"AUC (\d\.\d+) \(best possible (\d\.\d+)\), logloss (\d\.\d+)", output)
    # The clicks alone, without features, have an AUC of 0.5 and a logloss of 0.63.
    assert 0.7 < float(found) < float(best)
    assert float(logloss) < 0.6
