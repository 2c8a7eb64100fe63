"""The progress of a run, as a line at the bottom of the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar(Progress):
    """The context of a run of `steps` steps; `is_shown` None: if standard error is a terminal."""

    def __init__(self, name: str, steps: int, done: int, is_shown: bool | None) -> None:
        console = Console(stderr=True)
        is_hidden = not (console.is_terminal if is_shown is None else is_shown)
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(
            *columns, TextColumn("{task.fields[metrics]}"), console=console, disable=is_hidden, refresh_per_second=2
        )
        self._bar = self.add_task(name, total=steps, completed=done, metrics="")

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        """Show the number of steps done, and metrics if there are any."""
        if metrics:
            text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.update(self._bar, completed=done, metrics=text)
        else:
            self.update(self._bar, completed=done)
