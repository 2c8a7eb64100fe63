"""`make gpu-check`: its commands on each platform, and its message when it checks nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests import gpu_check


def test_without_a_gpu_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "backend", lambda: "cpu")
    monkeypatch.setattr(gpu_check, "has_gpu_without_plugin", lambda: False)
    assert gpu_check.check(None, lambda words, on: pytest.fail("ran something")) == 0
    assert capsys.readouterr().out == "gpu-check: JAX finds no GPU here, only cpu: nothing was checked\n"


def test_a_gpu_that_jax_cannot_use_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "backend", lambda: "cpu")
    monkeypatch.setattr(gpu_check, "has_gpu_without_plugin", lambda: True)
    assert gpu_check.check(None, lambda words, on: pytest.fail("ran something")) == 2
    assert "JAX has no plugin for it: pip install" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 1])
def test_on_a_gpu_it_runs_tests_and_full_benchmarks_and_tells_what_failed(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "backend", lambda: "gpu")
    ran: list[str] = []

    def do(words: Sequence[str], on: str) -> int:
        ran.append(" ".join(words))
        return status if words[0] == "benchmarks.call_cost" else 0

    assert gpu_check.check(None, do) == status
    assert ran == ["pytest -m device -q tests", "benchmarks.call_cost", "benchmarks.convnets"]
    told = "failed: benchmarks.call_cost" if status else "all passed"
    assert capsys.readouterr().out == f"gpu-check on gpu: {told}\n"
    assert gpu_check.environment("gpu")["JAX_PLATFORMS"] == "cuda,cpu"


def test_told_to_run_on_the_cpu_it_runs_the_same_in_little() -> None:
    ran: list[Sequence[str]] = []
    assert gpu_check.check("cpu", lambda words, on: ran.append(words) or 0) == 0
    assert [words[0] for words in ran] == ["pytest", "benchmarks.call_cost", "benchmarks.convnets"]
    assert all("--rounds" in words for words in ran[1:])
    assert gpu_check.environment("cpu")["JAX_PLATFORMS"] == "cpu"
