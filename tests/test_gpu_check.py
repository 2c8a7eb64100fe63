"""`make gpu-check`: its commands on each platform, and its message when it checks nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests import gpu_check


@pytest.mark.parametrize(
    ("is_there", "status", "text"),
    [
        (False, 0, "gpu-check: JAX finds no GPU here, only cpu: nothing was checked"),
        (True, 2, "JAX has no plugin for it: pip install"),
    ],
)
def test_without_a_gpu_for_jax_it_runs_nothing_and_a_gpu_without_plugin_is_a_failure(
    is_there: bool, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "backend", lambda platforms: ("cpu", 1))
    monkeypatch.setattr(gpu_check, "has_gpu_without_plugin", lambda: is_there)
    assert gpu_check.check(None, lambda words, on: pytest.fail("ran something")) == status
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(("status", "count"), [(0, 2), (1, 1)])
def test_on_a_gpu_it_runs_tests_examples_and_full_benchmarks_and_tells_what_failed(
    status: int, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "backend", lambda platforms: ("gpu", count))
    ran: list[str] = []

    def do(words: Sequence[str], on: str) -> int:
        ran.append(" ".join(words))
        return status if words[0] == "benchmarks.call_cost" else 0

    assert gpu_check.check(None, do) == status
    measured = ["call_cost", "convnets", "embedding --small", "many_variables", "devices"][: 3 + count]
    assert ran == [
        "pytest -m device -q tests",
        *(f"examples.{name}" for name in sorted(gpu_check.FEW_STEPS)),
        "dflow launch --ps 1 --workers 2 examples/digits.py",
        *(f"benchmarks.{name}" for name in measured),
    ]
    told = "failed: benchmarks.call_cost; one GPU: no benchmark of several devices" if status else "all passed"
    assert capsys.readouterr().out == f"gpu-check on gpu: {told}\n"
    settings = gpu_check.environment("gpu")
    assert (settings["JAX_PLATFORMS"], settings["XLA_PYTHON_CLIENT_PREALLOCATE"]) == ("cuda,cpu", "false")


def test_told_to_run_on_the_cpu_it_runs_the_same_in_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "backend", lambda platforms: (platforms, 1))
    ran: list[Sequence[str]] = []
    assert gpu_check.check("cpu", lambda words, on: ran.append(words) or 0) == 0
    of_examples = [words for words in ran if words[0].startswith("examples.")]
    files = {path.stem for path in (gpu_check.ROOT / "examples").glob("*.py")}
    assert {words[0] for words in of_examples} == {f"examples.{name}" for name in files}
    assert all(len(words) > 1 for words in of_examples)
    assert [words[1] for words in ran if words[0] == "benchmarks._tiny"] == list(gpu_check.BENCHMARKS)
    assert gpu_check.environment("cpu")["JAX_PLATFORMS"] == "cpu"
