"""Rounds of `make nightly`: their number, their seeds, and the report of failed ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests import nightly


@pytest.mark.parametrize(
    ("minutes", "lengths", "expected"),
    [(0, [5], 1), (10, [5], 2), (14, [5], 2), (15, [5], 3), (20, [5, 9, 5], 2), (20, [9, 5], 2)],
)
def test_no_round_begins_that_would_end_too_late(minutes: float, lengths: list[float], expected: int) -> None:
    now = [0.0]

    def run(seed: int) -> int:
        now[0] += lengths[min(seed - 7, len(lengths) - 1)]
        return 0

    assert list(nightly.rounds(7, minutes, run, lambda: now[0])) == list(range(7, 7 + expected))


def test_seeds_of_failed_rounds_are_told_and_the_others_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []

    def run(effort: int, seed: int, more: list[str]) -> int:
        ran.append((effort, seed, more))
        return int(seed == 12)

    monkeypatch.setattr(nightly, "run", run)
    monkeypatch.setattr(nightly, "rounds", lambda first, *rest: {seed: rest[1](seed) for seed in (first, first + 1)})
    assert nightly.main(["--minutes", "1", "--effort", "3", "--seed", "12", "--", "-n", "2"]) == 1
    assert ran == [(3, 12, ["-n", "2"]), (3, 13, ["-n", "2"])]
    told = capsys.readouterr().out
    assert (
        "2 rounds, from seed 12 to 13: 1 failed\n  to run it again: make nightly MINUTES=0 EFFORT=3 SEED=12\n" in told
    )


@pytest.mark.parametrize("status", [0, 1])
def test_the_long_tests_come_first_and_their_failure_is_told(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(nightly, "run_long", lambda more: ran.append(more) or status)
    monkeypatch.setattr(nightly, "rounds", lambda *_: ran.append("rounds") or {7: 0})
    assert nightly.main(["--", "-n", "2"]) == status
    assert ran == [["-n", "2"], "rounds"]
