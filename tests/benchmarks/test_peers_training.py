"""Training beside other runtimes: which loss curves are compared, and the rows of the table."""

from __future__ import annotations

import pytest

from benchmarks._trainers import Round
from benchmarks.peers_training import lines, refuse_other_curves


def test_curves_that_differ_are_refused() -> None:
    ours = {"dflow Async": [0.6, 0.5], "dflow Sync": [0.61, 0.51]}
    refuse_other_curves({**ours, "TensorFlow": [0.605, 0.504], "PyTorch DDP": [0.61, 0.511]})
    with pytest.raises(SystemExit, match=r"by 1% or more: TensorFlow \[0.605, 0.51\], dflow Async \[0.6, 0.5\]"):
        refuse_other_curves({**ours, "TensorFlow": [0.605, 0.51]})
    with pytest.raises(SystemExit, match=r"by 1% or more: PyTorch DDP .*, dflow Sync"):
        refuse_other_curves({**ours, "PyTorch DDP": [0.6165, 0.51]})
    with pytest.raises(SystemExit, match=r"by 3% or more: dflow Async .*, dflow Sync"):
        refuse_other_curves({**ours, "dflow Sync": [0.61, 0.52]})
    with pytest.raises(SystemExit, match="dflow Async trains nothing"):
        refuse_other_curves({"dflow Async": [0.6, 0.6]})


def test_a_row_has_the_ratios_of_examples_per_second_round_by_round() -> None:
    ours = [Round(step_s, 0.5, 0.25) for step_s in (1.0, 2.0, 1.0)]
    theirs = [Round(step_s, 1.0, 0.25) for step_s in (2.0, 2.0, 4.0)]
    one, other = lines({"dflow Async": ours, "TensorFlow": theirs}, 100)
    assert one == {
        "way": "dflow Async",
        "examples/s": 100,
        "ms": 1000,
        "cpu ms": 500,
        "loss": 0.25,
        "/ TensorFlow": "2.00 (1.00 to 4.00)",
    }
    assert other["/ dflow Async"] == "0.50 (0.25 to 1.00)"
