"""A run whose one variable tells its step, a clock that is set by hand, and a save that waits for the test."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import dflow
from dflow.training import background_save, checkpoint_manager

DEADLINE_S = 60.0


class HandClock:
    """Stands in for the module `time` of the manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000_000.0
        #: The wall clock is ahead of the other by this.
        self.ahead_s = 0.0
        for module in (checkpoint_manager, background_save):
            monkeypatch.setattr(module, "time", self)

    def time(self) -> float:
        return self.now_s + self.ahead_s

    def monotonic(self) -> float:
        return self.now_s


class Run:
    """The variables of a program that counts its steps, and those of the same program started again."""

    def __init__(self) -> None:
        self.seen = dflow.Variable(jnp.full(4, -1.0), name="seen")

    def manager(self, folder: Path | str, **options: Any) -> dflow.CheckpointManager:
        return dflow.CheckpointManager(folder, {"seen": self.seen}, **options)

    def set(self, step: int) -> None:
        self.seen.assign(jnp.full(4, float(step)))

    @property
    def last(self) -> int:
        (value,) = set(self.seen.read().tolist())
        return int(value)


def saved(manager: dflow.CheckpointManager, run: Run, step: int, **metrics: float) -> None:
    """Save the state after `step`, and wait for it."""
    run.set(step)
    manager.save(step, metrics, is_finite=not any(map(math.isnan, metrics.values())))
    manager.wait()


def steps_in(manager: dflow.CheckpointManager) -> list[int]:
    return [one.step for one in manager.checkpoints]


@contextmanager
def held_saves(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the threads that write until the event is set, which the end of the block does."""
    may_write, original = threading.Event(), checkpoint_manager.whole_location

    def whole_location(*args: Any, **options: Any) -> Any:
        assert may_write.wait(DEADLINE_S)
        return original(*args, **options)

    monkeypatch.setattr(checkpoint_manager, "whole_location", whole_location)
    try:
        yield may_write
    finally:
        may_write.set()
