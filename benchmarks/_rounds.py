"""Training processes of several runtimes that take turns, a round of steps each; the idle ones wait for their input.

The training process calls `train`. The benchmark starts it as a `Trainer`, and asks it for rounds. This file imports
neither JAX nor dflow, since the processes of other runtimes import it too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUN_S = 900


@dataclass(frozen=True)
class Round:
    """The times of a round's steps in s, and the loss of its last step."""

    times: list[float]
    loss: float


def train(step: Callable[[], float], began: float) -> None:
    """Run a first step, then as many steps as each line of the input says; print times as JSON.

    step   runs a training step to its end and returns its loss
    began  time of the end of the process's imports, by `time.perf_counter`
    """
    loss = step()
    _print({"first_s": time.perf_counter() - began, "loss": loss})
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            started = time.perf_counter()
            loss = step()
            times.append(time.perf_counter() - started)
        _print({"times": times, "loss": loss})


def _print(found: Mapping[str, Any]) -> None:
    print("measured " + json.dumps(found), flush=True)


class Trainer:
    """A process that calls `train`, seen from the benchmark. It is killed if it outlives `RUN_S`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._deadline = threading.Timer(RUN_S, self._process.kill)
        self._deadline.start()
        self._other_output: list[str] = []

    def first(self) -> tuple[float, float]:
        """Wait for the first step; return the time in s from the end of the imports to its end, and its loss."""
        found = self._measured()
        return found["first_s"], found["loss"]

    def round(self, steps: int) -> Round:
        """Run a round of this many steps."""
        self.start_round(steps)
        return self.end_round()

    def start_round(self, steps: int) -> None:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)

    def end_round(self) -> Round:
        return Round(**self._measured())

    def close(self) -> None:
        """End the process."""
        self._deadline.cancel()
        self._process.kill()
        self._process.communicate()

    def _measured(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _, is_measured, printed = line.partition("measured ")
            if is_measured:
                found: dict[str, Any] = json.loads(printed)
                return found
            self._other_output.append(line)
        raise SystemExit("a training process ended early:\n" + "".join(self._other_output))
