"""The models of clusters and of backup workers: against plain ones, and against what the papers measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._backup_model import RATIO_3, STEP_0, STEP_4, STEP_200, BackupModel, log_normal, stragglers
from benchmarks._cluster_model import MB, PAPER, PAPER_INCEPTION, ClusterModel, Computing, Hardware, Shape, Step, served
from benchmarks._coordinator_load import coordinator_load
from benchmarks.cluster_size import main
from benchmarks.scaling import INCEPTION, NULL_STEPS, PAPER_MS


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.sampled_from([0.0, 1.0, 2.5]))
def test_a_server_takes_one_piece_after_another_in_order_of_arrival(arrivals: list[int], service_s: float) -> None:
    expected, free_s = {}, 0.0
    for at_s, place in sorted((at_s, place) for place, at_s in enumerate(arrivals)):
        free_s = expected[place] = max(free_s, at_s) + service_s
    found = served(np.array([arrivals], np.float64), service_s)[0]
    assert found.tolist() == [expected[place] for place in range(len(arrivals))]


@pytest.mark.parametrize("kind", NULL_STEPS)
@pytest.mark.parametrize("workers", [1, 100])
def test_the_null_step_takes_as_long_as_in_the_paper(kind: str, workers: int) -> None:
    one_ms, hundred_ms, is_fitted = PAPER_MS[kind]
    median_ms = 1e3 * float(np.median(ClusterModel(PAPER, Shape(workers, 16)).synchronous(NULL_STEPS[kind], 60)))
    within = 0.03 if workers == 1 or is_fitted else 0.12
    assert median_ms == pytest.approx(one_ms if workers == 1 else hundred_ms, rel=within)


def test_training_flattens_and_reaches_the_papers_throughput() -> None:
    each = {
        workers: 32
        / float(np.median(ClusterModel(PAPER, Shape(workers, 17), PAPER_INCEPTION).synchronous(INCEPTION, 60)))
        for workers in (25, 50, 100, 200, 400)
    }
    assert sorted(each.values(), reverse=True) == list(each.values())
    assert each[200] * 200 == pytest.approx(2300, rel=0.05)


def test_backup_workers_shorten_the_step_less_and_less() -> None:
    times = [
        float(np.median(ClusterModel(PAPER, Shape(50 + b, 17, backups=b), PAPER_INCEPTION).synchronous(INCEPTION, 300)))
        for b in range(5)
    ]
    gains = [before - after for before, after in itertools.pairwise(times)]
    assert all(gain > 0 for gain in gains)
    assert gains[0] > gains[1] > gains[3]
    assert times[4] == pytest.approx(1.93, rel=0.02)


def test_asynchronous_throughput_is_bounded_by_the_links_of_the_ps_tasks() -> None:
    links = Hardware(link_bytes_per_s=100 * MB, hop_s=1e-4, message_s=1e-5)
    step, steps = Step(10 * MB, 10 * MB), 40
    for workers in (1, 8, 64):
        times = ClusterModel(links, Shape(workers, 4, is_synchronous=False), Computing(0.1)).asynchronous(step, steps)
        rate = workers / float(np.mean(times[steps // 2 :]))
        alone = 1 / (0.1 + 2 * 0.1)
        assert rate == pytest.approx(min(workers * alone, 4 * 100 / 10), rel=0.15)


def test_the_same_seed_gives_the_same_times() -> None:
    one, other = (ClusterModel(PAPER, Shape(5, 3), PAPER_INCEPTION, seed=3).synchronous(INCEPTION, 4) for _ in range(2))
    assert one.tolist() == other.tolist()


def test_somebody_has_to_be_waited_for() -> None:
    with pytest.raises(ValueError, match="3 of 3 workers are backups; at least one has to be waited for"):
        Shape(3, 1, backups=3)


def test_the_coordinators_load_counts_what_the_tasks_send_and_get() -> None:
    load = coordinator_load(workers=80, ps=4, step_s=0.5, claim_steps=2, seconds=2)
    assert load.tasks == 84
    # Of each second: 84 heartbeats, 80 claims with their answers.
    assert load.steady.messages == 84 + 2 * 80
    # Its Join with the answer, and the news to all 84.
    assert load.join.messages == 2 + 84
    assert load.steady.processor_s > 0


def test_a_cluster_of_any_size_is_estimated_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "40", "--ps", "4", "--steps", "5"]
    main([*words, "--step", "dense", "--mb", "10", "--link-gbit", "10"])
    output = capsys.readouterr().out
    assert "dense step, 40 workers, 4 ps tasks" in output
    assert "coordinator of 44 tasks, measured on this machine" in output
    main([*words, "--asynchronous", "--slow", "0.1", "--hidden", "0.5"])
    assert "train step, 40 workers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--backups", "40"])
    assert "40 of 40 workers are backups" in capsys.readouterr().err


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
