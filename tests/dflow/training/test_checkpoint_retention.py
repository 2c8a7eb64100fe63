"""When a manager saves, and which checkpoints remain, with a manual clock, against a model of all history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dflow
from dflow.training.retention import Best, Checkpoint, deleted
from dflow.training.save_schedule import RunRecord, SaveSchedule, daly_interval_s
from tests.dflow.training.managed_run import HandClock, Run, saved, steps_in
from tests.effort import examples

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

HOUR_S = 3600.0

rules = st.fixed_dictionaries(
    {
        "keep": st.integers(1, 3),
        "best": st.none() | st.tuples(st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
        "keep_one_per": st.none() | st.sampled_from([timedelta(hours=hours) for hours in (1, 3)]),
    }
)
#: Steps since the save before, seconds since it, and the loss, if there is one.
saves = st.tuples(
    st.integers(1, 3),
    st.sampled_from([0.0, 600.0, HOUR_S, 2 * HOUR_S]),
    st.none() | st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf, math.nan]),
)


def expected(history: Sequence[Checkpoint], rules: dict[str, Any]) -> list[int]:
    """Return the steps that remain of all that were ever saved."""
    retained = {one.step for one in history[-rules["keep"] :]}
    retained.update(one.step for one in [one for one in history if one.is_finite][-1:])
    if rules["best"] is not None:
        _, count, extreme = rules["best"]
        left = [one for one in history if not math.isnan(one.metrics.get("loss", math.nan))]
        for _ in range(min(count, len(left))):
            extreme_loss = (min if extreme == "min" else max)(one.metrics["loss"] for one in left)
            best = [one for one in left if one.metrics["loss"] == extreme_loss][-1]
            retained.add(best.step)
            left.remove(best)
    if rules["keep_one_per"] is not None and history:
        latest = history[0]
        retained.add(latest.step)
        for one in history:
            if one.ran_s - latest.ran_s >= rules["keep_one_per"].total_seconds():
                latest = one
                retained.add(one.step)
    return sorted(retained)


def in_turn(made: Sequence[tuple[int, float, float | None]]) -> list[Checkpoint]:
    step, ran_s, history = -1, 0.0, []
    for steps, seconds, loss in made:
        step, ran_s = step + steps, ran_s + seconds
        is_finite = loss is None or not math.isnan(loss)
        metrics = {} if loss is None else {"loss": loss}
        history.append(Checkpoint(step, Path(str(step)), 0.0, metrics, ran_s, is_finite=is_finite))
    return history


@settings(max_examples=examples(300))
@given(st.lists(saves, max_size=30), rules)
def test_deleting_after_each_save_leaves_what_the_whole_history_says(
    made: list[tuple[int, float, float | None]], rules: dict[str, Any]
) -> None:
    best = Best.parsed(rules["best"])
    history, left = in_turn(made), list[Checkpoint]()
    for count, one in enumerate(history, 1):
        left.append(one)
        for old in deleted(left, rules["keep"], best, rules["keep_one_per"]):
            left.remove(old)
        assert [one.step for one in left] == expected(history[:count], rules)
        assert one in left


@settings(max_examples=examples(12))
@given(made=st.lists(st.tuples(saves, st.booleans(), st.integers(-9, 9)), min_size=3, max_size=10), rules=rules)
def test_a_manager_leaves_these_checkpoints_also_over_restarts(
    made: list[tuple[tuple[int, float, float | None], bool, int]],
    rules: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The wall clock is set by days before each save; the time between two runs does not count."""
    folder, history = tmp_path_factory.mktemp("run"), in_turn([one for one, *_ in made])
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, run = HandClock(monkeypatch), Run()
        start_s, manager = clock.now_s, run.manager(folder, **rules)
        for count, (one, (_, restarts, days)) in enumerate(zip(history, made, strict=True), 1):
            clock.now_s, clock.ahead_s = start_s + one.ran_s, days * 24 * HOUR_S
            saved(manager, run, one.step, **one.metrics)
            assert steps_in(manager) == expected(history[:count], rules)
            if restarts:
                manager.close()
                start_s += HOUR_S
                clock.now_s += HOUR_S
                run = Run()
                manager = run.manager(folder, **rules)
                assert (manager.resumed, run.last) == (one.step, one.step)
        manager.close()
        for checkpoint in manager.checkpoints:
            dflow.restore(checkpoint.path, {"seen": run.seen})
            assert run.last == checkpoint.step


def test_the_best_checkpoint_is_named(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, keep=1, best=("loss", 2, "min")) as manager:
        assert manager.best is None
        for step, loss in enumerate([3.0, 1.0, math.nan, 1.0, 2.0]):
            saved(manager, run, step, loss=loss)
        assert manager.best is not None
        assert (manager.best.step, manager.best.path, manager.best.metrics) == (3, tmp_path / "step_3", {"loss": 1.0})
        assert steps_in(manager) == [1, 3, 4]


DAY = timedelta(days=1)


def lost(interval_s: float, save_s: float, failure_interval_s: float) -> float:
    """Expected time of a run per second of work, with failures at random (Daly 2006, equation 20), without restarts."""
    return failure_interval_s * math.expm1((interval_s + save_s) / failure_interval_s) / interval_s


@given(st.floats(0.01, 1e3), st.floats(60.0, 1e6), st.floats(0.3, 3.0))
def test_no_other_interval_loses_clearly_less(save_s: float, failure_interval_s: float, other: float) -> None:
    assume(save_s < failure_interval_s / 8)
    interval_s = daly_interval_s(save_s, failure_interval_s)
    assert interval_s >= save_s
    least = lost(interval_s, save_s, failure_interval_s)
    assert least <= 1.005 * lost(other * interval_s, save_s, failure_interval_s)


@pytest.mark.parametrize(("save_s", "failure_interval_s"), [(10.0, 5.0), (10.0, 3.0), (10.0, 6.0), (10.0, 1e-3)])
def test_the_interval_is_never_shorter_than_a_save(save_s: float, failure_interval_s: float) -> None:
    assert daly_interval_s(save_s, failure_interval_s) >= save_s


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 20))
def test_every_multiple_is_saved_or_the_first_step_after_it(strides: list[int], every: int) -> None:
    schedule, last, step, multiples = SaveSchedule(every, DAY), -1, -1, set[int]()
    for stride in strides:
        step += stride
        passed = {number for number in range(step - stride + 1, step + 1) if number % every == 0}
        is_due = schedule.is_due(step, last, 0.0, None)
        assert is_due == bool(passed)
        if is_due:
            last, multiples = step, multiples | passed


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 1e5)), max_size=20), st.floats(1.0, 1e6))
def test_the_time_between_failures_is_that_of_the_runs_with_one_failure_assumed(
    runs: list[tuple[bool, float]], prior_s: float
) -> None:
    record = RunRecord()
    for is_closed, ran_s in runs:
        record = record.begun("a process").saved(1.0, ran_s)
        record = record.ended(ran_s) if is_closed else record
    failures = sum(not is_closed for is_closed, _ in runs)
    total_s = prior_s + sum(ran_s for _, ran_s in runs)
    seen = record.begun("the next")
    assert seen.failures == failures
    assert seen.failure_interval_s(prior_s) == pytest.approx(total_s / (1 + failures))


def test_the_interval_comes_from_the_last_saves() -> None:
    schedule, record = SaveSchedule("auto", DAY), RunRecord().begun("a process")
    assert schedule.interval_s(record) is None
    assert schedule.is_due(0, -1, 0.0, None)
    for took_s in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        record = record.saved(took_s, 0.0)
    assert record.save_s == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert schedule.interval_s(record) == daly_interval_s(3.0, DAY.total_seconds())
