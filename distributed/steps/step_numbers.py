"""Numbering of the steps that a task starts."""

from __future__ import annotations

import itertools
import time

from dflow.lowering.queues.channel import STEPS_OF_A_LIFE

_lives = itertools.count()


def first_of_a_life() -> int:
    """Return a first step number for a task that starts now, greater than the numbers of its earlier lives."""
    tenths_of_s = time.time_ns() // 100_000_000
    return (tenths_of_s + next(_lives)) * STEPS_OF_A_LIFE
