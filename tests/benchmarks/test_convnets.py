"""The benchmark's networks: the paper's shapes, and equal losses by dflow, JAX and, if installed, PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from benchmarks._convnet_models import GOOGLENET, NETWORKS, Dense, Mean, Network, initial, shape_through, weights
from benchmarks.convnets import COMPILED, TORCH, refuse_other_losses, row, steps

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
    refuse_other_losses(network, losses, np.float32)
    assert losses["dflow"] == losses["jax"]
    assert len(set(losses["jax"])) == 3


def test_ways_that_differ_end_the_benchmark() -> None:
    with pytest.raises(SystemExit, match=r"AlexNet: the losses are \[2.0\] by jax and \[2.1\] by torch"):
        refuse_other_losses(NETWORKS[0], {"jax": [2.0], TORCH: [2.1]}, np.float32)


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
