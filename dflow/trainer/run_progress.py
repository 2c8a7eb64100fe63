"""The progress of a run: means of the results of its steps, and a line at the bottom of the terminal.

Only values that are computed are read, so that no step waits for the devices.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflow.distributed.training.metric_states import computed, named_results, on_host, states
from dflow.distributed.training.step_report import scalars

#: Most results that a mean is over, so that a step costs no more than keeping its result.
MOST_RESULTS = 100


class RunningMeans:
    """The real scalars and states of metrics of steps' results; a result that is one scalar is named `loss`."""

    def __init__(self) -> None:
        self._results: deque[dict[str, Any]] = deque(maxlen=MOST_RESULTS)

    def add(self, outcome: Any) -> None:
        """Add the result of a step, which may not be computed yet. Larger arrays in it are not kept."""
        named = named_results(outcome)
        self._results.append({name: value for name, value in named.items() if not getattr(value, "shape", ())})

    def take(self, *, waits: bool = False) -> dict[str, float]:
        """Return the means over the newest results since the last call, at most `MOST_RESULTS`, and values of states.

        Unless it `waits`, only over those before the first that is not computed; the others are for the next call.
        """
        values: defaultdict[str, list[float]] = defaultdict(list)
        merged: dict[str, Any] = {}
        while self._results and (waits or all(map(_is_computed, self._results[0].values()))):
            result = self._results.popleft()
            for name, value in scalars(result):
                values[name].append(float(value))
            for name, state in states(result).items():
                here = on_host(state)
                merged[name] = on_host(merged[name].merge(here)) if name in merged else here
        means = {name: sum(found) / len(found) for name, found in values.items()}
        return means | {key: number for name, state in merged.items() for key, number in computed(name, state).items()}


def _is_computed(value: Any) -> bool:
    return all(not hasattr(leaf, "is_ready") or leaf.is_ready() for leaf in jax.tree_util.tree_leaves(value))


@contextmanager
def progress_bar(
    name: str, steps: int, done: int, is_shown: bool | None
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield a function that shows the number of steps done of `steps`, and metrics if there are any.

    is_shown  None: if standard error is a terminal
    """
    console = Console(stderr=True)
    is_hidden = not (console.is_terminal if is_shown is None else is_shown)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[metrics]}")
    with Progress(TextColumn(name), *columns, console=console, disable=is_hidden, refresh_per_second=2) as bar:
        task = bar.add_task(name, total=steps, completed=done, metrics="")

        def show(done: int, metrics: Mapping[str, float]) -> None:
            text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            bar.update(task, completed=done)
            if text:
                bar.update(task, metrics=text)

        yield show
