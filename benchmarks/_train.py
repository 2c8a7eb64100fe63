"""The loop of a training process that alternates with others; `_trainers.Trainer` is its other end.

The file imports neither JAX nor dflow, since the processes of other runtimes import it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


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
