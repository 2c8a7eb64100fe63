"""Which checkpoints remain after any sequence of saves, with a manual clock, against a model that keeps all history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.training.retention import Best, Checkpoint, deleted
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
        history.append(Checkpoint(step, Path(str(step)), 0.0, {} if loss is None else {"loss": loss}, ran_s))
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
