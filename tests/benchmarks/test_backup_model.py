"""The explicit model of backup workers: against drawn times, and against what the paper says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks._backup_model import RATIO_3, STEP_0, STEP_4, STEP_200, BackupModel, log_normal, stragglers


@pytest.mark.parametrize("backups", [0, 2])
def test_the_step_is_the_median_of_drawn_ones(backups: int) -> None:
    model = BackupModel(median_s=2.0, spread=0.1, cost_s=0.01, slow_fraction=0.2, slower=0.5)
    draw, shape = np.random.default_rng(0), (20_000, 8 + backups)
    times = 2.0 * np.exp(0.1 * draw.standard_normal(shape)) * (1 + 0.5 * (draw.random(shape) < 0.2))
    drawn = np.median(np.sort(times)[:, 7]) + 0.01 * shape[1]
    assert model.step_s(8, backups) == pytest.approx(drawn, rel=0.005)


@pytest.mark.parametrize("model", [log_normal(), stragglers(), stragglers(0.01)])
def test_the_models_have_the_figures_that_they_are_fitted_to(model: BackupModel) -> None:
    assert model.step_s(50) / model.step_s(50, 3) == pytest.approx(RATIO_3, rel=1e-4)
    assert model.step_s(50, 4) == pytest.approx(STEP_4, rel=1e-4)
    assert model.step_s(200) == pytest.approx(STEP_200, rel=1e-4)
    assert not model.slow_fraction or model.step_s(50) == pytest.approx(STEP_0, rel=1e-4)


def test_stragglers_give_the_papers_shape_and_log_normal_times_do_not() -> None:
    shortest, best = {}, {}
    for name, model in (("log-normal", log_normal()), ("stragglers", stragglers())):
        steps_s = [model.step_s(50, backups) for backups in range(6)]
        shortest[name] = int(np.argmin(steps_s))
        best[name] = int(np.argmax([steps_s[0] / step_s * 50 / (50 + b) for b, step_s in enumerate(steps_s)]))
    # In the paper 4 and 3.
    assert shortest == {"log-normal": 5, "stragglers": 4}
    assert best == {"log-normal": 5, "stragglers": 3}
