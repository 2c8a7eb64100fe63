"""Comparisons: the order of alternatives, their rounds, and equal losses of processes, networks and libraries."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks import convnets, peers_training
from benchmarks._convnet_models import GOOGLENET, NETWORKS, Dense, Mean, Network, initial, shape_through, weights
from benchmarks._paired import in_turn
from benchmarks._trainers import Round, Trainer, Way, lines, refuse_other_losses, rounds_of
from benchmarks.convnets import COMPILED, TORCH, row, steps

#: A training process whose loss is the number of its steps from `start` on, downwards.
COUNTS = """
import time, itertools
from benchmarks._train import train
losses = itertools.count({start}, -1)
print("a line of a library")
train(lambda: float(next(losses)), time.perf_counter())
"""


@contextlib.contextmanager
def counting(*starts: int) -> Iterator[Way]:
    with contextlib.ExitStack() as stack:
        trainers = [Trainer([sys.executable, "-c", COUNTS.format(start=start)], os.environ) for start in starts]
        for trainer in trainers:
            stack.enter_context(contextlib.closing(trainer))
        yield Way(trainers)


def test_every_process_of_every_way_does_the_steps_of_every_round() -> None:
    with counting(100, 300) as one, counting(100) as other:
        found = rounds_of({"one": one, "other": other}, 3, 2)
        again = one.round(1)
    # A first step, a round that is not measured, three rounds, and one more step; the losses are of the first process.
    assert one.first_loss == 100
    assert [each.loss for each in found["one"]] == [each.loss for each in found["other"]] == [96, 94, 92]
    assert again.loss == 91


def test_a_process_that_fails_is_an_error_with_its_output() -> None:
    fails = [sys.executable, "-c", "print('first', flush=True); raise OSError('no')"]
    with (
        contextlib.closing(Trainer(fails, os.environ)) as one,
        pytest.raises(SystemExit, match=r"ended early:\nfirst\n(.|\n)*OSError: no"),
    ):
        Way([one])


def test_ways_with_other_losses_are_not_compared() -> None:
    with pytest.raises(SystemExit, match=r"losses: dflow has \[3.0, 2.0\], by hand has \[3.0, 2.1\]"):
        refuse_other_losses({"dflow": [3.0, 2.0], "by hand": [3.0, 2.1]})
    with pytest.raises(SystemExit, match=r"losses: dflow has \[3.0, 2.0\], by hand has \[3.0, nan\]"):
        refuse_other_losses({"dflow": [3.0, 2.0], "by hand": [3.0, float("nan")]})
    with pytest.raises(SystemExit, match="dflow trains nothing"):
        refuse_other_losses({"dflow": [3.0, 3.0]})


def test_a_line_has_medians_and_the_ratios_round_by_round() -> None:
    ours = [Round(step_s, 0.5, 0.0) for step_s in (2.0, 4.0, 9.0)]
    theirs = [Round(step_s, 0.25, 0.0) for step_s in (1.0, 1.0, 3.0)]
    made = lines({"dflow": ours, "by hand": theirs})
    assert made["dflow"] == {"way": "dflow", "ms": 4000, "dflow / way": 1, "p10": 1, "p90": 1, "cpu ms": 500}
    assert made["by hand"] == {"way": "by hand", "ms": 1000, "dflow / way": 3, "p10": 2, "p90": 4, "cpu ms": 250}


def order(ways: str, rounds: int) -> list[str]:
    """Return the order of the alternatives in each round."""
    ran: list[str] = []
    in_turn({way: partial(ran.append, way) for way in ways}, rounds)
    return ran


def test_each_way_is_measured_once_in_each_round_and_its_figures_stay_in_order() -> None:
    times = iter(range(12))
    found = in_turn({way: lambda: next(times) for way in "abc"}, 4)
    for number in range(4):
        assert sorted(figures[number] // 3 for figures in found.values()) == [number] * 3


@pytest.mark.parametrize("ways", ["ab", "abc", "abcde"])
def test_no_way_follows_another_or_itself_more_often_than_the_others_do(ways: str) -> None:
    ran = order(ways, 4000)
    followed = Counter(pairwise(ran))
    for way in ways:
        # It comes first in a round after any alternative; within a round after any of the others.
        itself, others = followed[way, way], [followed[before, way] for before in ways if before != way]
        assert itself == pytest.approx(4000 / len(ways) ** 2, rel=0.15)
        assert max(others) == pytest.approx(min(others), rel=0.15)


def test_two_runs_have_the_same_order() -> None:
    assert order("abc", 20) == order("abc", 20)
    assert len({tuple(order("abc", 20)[start : start + 3]) for start in range(0, 60, 3)}) > 2


#: In millions of parameters, as published: AlexNet with one tower, Overfeat's fast model, VGG-A, GoogleNet.
MILLIONS = {"AlexNet": 61.1, "Overfeat": 145.9, "OxfordNet": 132.9, "GoogleNet": 7.0}
SMALLEST = {"AlexNet": 63, "Overfeat": 99, "OxfordNet": 32, "GoogleNet": 32}


def small(network: Network) -> Network:
    """The network with few channels; of GoogleNet one block of branches, since each takes seconds to compile."""
    narrow = network.narrowed(by=16, image=SMALLEST[network.name])
    return replace(narrow, layers=(*narrow.layers[:6], *narrow.layers[-2:])) if network is GOOGLENET else narrow


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_each_network_has_the_shapes_of_the_papers(network: Network) -> None:
    images = (network.image, network.image, 3)
    assert shape_through(network.layers, images) == (1000,)
    count = sum(math.prod(shape) + shape[-1] for _, shape, _ in weights(network.layers, images))
    assert count / 1e6 == pytest.approx(MILLIONS[network.name], abs=0.05)


@pytest.mark.once
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_every_way_trains_alike(network: Network) -> None:
    ways = dict(steps(small(network), 4, np.float32, compiled=False))
    assert set(ways) == {"dflow", "jax", *([TORCH] if find_spec("torch") else [])}
    losses = {name: [step() for _ in range(3)] for name, step in ways.items()}
    convnets.refuse_other_losses(network, losses, np.float32)
    assert losses["dflow"] == losses["jax"]
    assert len(set(losses["jax"])) == 3


def test_ways_that_differ_end_the_benchmark() -> None:
    with pytest.raises(SystemExit, match=r"AlexNet: the losses are \[2.0\] by jax and \[2.1\] by torch"):
        convnets.refuse_other_losses(NETWORKS[0], {"jax": [2.0], TORCH: [2.1]}, np.float32)


def test_a_row_leaves_the_columns_of_what_is_not_here_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.convnets.find_spec", lambda name: None)
    network = replace(small(NETWORKS[0]), layers=(Mean(), Dense(8, relu=False)))
    told: dict[str, Any] = row(network, 2, np.float32, 1, compiled=True)
    assert (told[f"{TORCH} ms"], told[f"dflow / {COMPILED}"]) == ("-", "-")
    assert told["dflow / jax"] > 0


def test_parameters_are_drawn_the_same_each_time() -> None:
    network = small(NETWORKS[3])
    for name, value in initial(network).items():
        np.testing.assert_array_equal(value, initial(network)[name])


def test_curves_that_differ_are_refused() -> None:
    ours = {"dflow Async": [0.6, 0.5], "dflow Sync": [0.61, 0.51]}
    peers_training.refuse_other_curves({**ours, "TensorFlow": [0.605, 0.504], "PyTorch DDP": [0.61, 0.511]})
    with pytest.raises(SystemExit, match=r"by 1% or more: TensorFlow \[0.605, 0.51\], dflow Async \[0.6, 0.5\]"):
        peers_training.refuse_other_curves({**ours, "TensorFlow": [0.605, 0.51]})
    with pytest.raises(SystemExit, match=r"by 1% or more: PyTorch DDP .*, dflow Sync"):
        peers_training.refuse_other_curves({**ours, "PyTorch DDP": [0.6165, 0.51]})
    with pytest.raises(SystemExit, match=r"by 3% or more: dflow Async .*, dflow Sync"):
        peers_training.refuse_other_curves({**ours, "dflow Sync": [0.61, 0.52]})
    with pytest.raises(SystemExit, match="dflow Async trains nothing"):
        peers_training.refuse_other_curves({"dflow Async": [0.6, 0.6]})


def test_a_row_has_the_ratios_of_examples_per_second_round_by_round() -> None:
    ours = [Round(step_s, 0.5, 0.25) for step_s in (1.0, 2.0, 1.0)]
    theirs = [Round(step_s, 1.0, 0.25) for step_s in (2.0, 2.0, 4.0)]
    one, other = peers_training.lines({"dflow Async": ours, "TensorFlow": theirs}, 100)
    assert one == {
        "way": "dflow Async",
        "examples/s": 100,
        "ms": 1000,
        "cpu ms": 500,
        "loss": 0.25,
        "/ TensorFlow": "2.00 (1.00 to 4.00)",
    }
    assert other["/ dflow Async"] == "0.50 (0.25 to 1.00)"
