"""Where a task begins to count the steps that it starts."""

from __future__ import annotations

import itertools
import time

from dflow.lowering.channel import STEPS_OF_A_LIFE

_lives = itertools.count()


def first_of_a_life() -> int:
    """The first number of the steps of a task that begins now: none of its past lives on any host has come so far."""
    tenths_of_s = time.time_ns() // 100_000_000
    return (tenths_of_s + next(_lives)) * STEPS_OF_A_LIFE
