"""Training processes that alternate: their rounds, and the comparison of their losses."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest

from benchmarks._trainers import Round, Trainer, Way, lines, refuse_other_losses, rounds_of

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
