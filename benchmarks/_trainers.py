"""Ways to train that alternate, a round of steps each; the idle ones wait for their input.

A way has one training process or more, which call `_train.train`, and possibly other processes.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks._paired import in_turn, median_ratio
from benchmarks.startup import processor_s

ROOT = Path(__file__).parents[1]
RUN_S = 1800
#: Largest difference between the losses of two ways, as a fraction of the loss.
SAME = 1e-3


@dataclass(frozen=True)
class Round:
    """The median step of a round in s, the processor time of all processes per step in s, and the last loss."""

    step_s: float
    processor_s: float
    loss: float


class Trainer:
    """A process that calls `train`, seen from the benchmark. It is killed if it outlives `RUN_S`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._deadline = threading.Timer(RUN_S, self.process.kill)
        self._deadline.daemon = True
        self._deadline.start()
        self._other_output: list[str] = []

    def start_round(self, steps: int) -> None:
        """Have the process do this many steps."""
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)

    def measured(self) -> dict[str, Any]:
        """Wait for the figures of the first step or of a round."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            _, is_measured, printed = line.partition("measured ")
            if is_measured:
                found: dict[str, Any] = json.loads(printed)
                return found
            self._other_output.append(line)
        raise SystemExit("a training process ended early:\n" + "".join(self._other_output))

    def close(self) -> None:
        """End the process."""
        self._deadline.cancel()
        self.process.kill()
        self.process.communicate()


class Way:
    """Training processes that do their steps at the same time, and the other processes (`tasks`) that they use."""

    def __init__(self, trainers: Sequence[Trainer], tasks: Sequence[int] = ()) -> None:
        self._trainers, self._tasks = trainers, tasks
        first, *_ = [trainer.measured() for trainer in trainers]
        #: Time in s from the end of the imports to the end of the first step, of the first training process.
        self.first_s: float = first["first_s"]
        self.first_loss: float = first["loss"]

    def round(self, steps: int) -> Round:
        """Run a round; its times are those of the first training process."""
        found, each_s = self.measured(steps)
        return Round(median(found[0]["times"]), each_s, found[0]["loss"])

    def measured(self, steps: int) -> tuple[list[dict[str, Any]], float]:
        """Run a round; return the figures of each training process, and the processor time of all per step in s."""
        before = self._processor_s()
        for trainer in self._trainers:
            trainer.start_round(steps)
        found = [trainer.measured() for trainer in self._trainers]
        return found, (self._processor_s() - before) / steps

    def _processor_s(self) -> float:
        parents = [trainer.process.pid for trainer in self._trainers]
        return sum(map(processor_s, [*parents, *self._tasks, *(child for pid in parents for child in children(pid))]))


def children(pid: int) -> list[int]:
    """Return the processes that a process's main thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def rounds_of(ways: Mapping[str, Way], rounds: int, steps: int) -> dict[str, list[Round]]:
    """Return the rounds of each way, after one round that is not measured. Exit if their losses differ."""
    for way in ways.values():
        way.round(steps)
    found = in_turn({name: partial(way.round, steps) for name, way in ways.items()}, rounds)
    refuse_other_losses({name: [way.first_loss, *(each.loss for each in found[name])] for name, way in ways.items()})
    return found


def refuse_other_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Exit unless all ways have the same losses, and train."""
    ours, *others = losses
    for way in others:
        if not np.allclose(losses[way], losses[ours], rtol=SAME):
            raise SystemExit(f"losses: {ours} has {losses[ours]}, {way} has {losses[way]}")
    if not abs(losses[ours][-1] / losses[ours][0] - 1) > SAME:
        raise SystemExit(f"{ours} trains nothing, the losses are {losses[ours]}")


def lines(found: Mapping[str, Sequence[Round]]) -> dict[str, dict[str, Any]]:
    """Return the columns of each way: medians, and the ratios of the first way's steps to those of this one."""
    times = {way: [each.step_s for each in rounds] for way, rounds in found.items()}
    ours = next(iter(times.values()))
    made: dict[str, dict[str, Any]] = {}
    for way, rounds in found.items():
        made[way] = {"way": way, "ms": 1e3 * median(times[way])}
        made[way] |= dict(zip(("dflow / way", "p10", "p90"), median_ratio(ours, times[way]), strict=True))
        made[way]["cpu ms"] = 1e3 * mean(each.processor_s for each in rounds)
    return made
