"""The cluster of one: what `dflow.connect()` gives a program that nobody launched as part of a larger one.

It answers as `Cluster` does, so that a script is the same lines in one process and in many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dflow.lowering.pipeline import ALONE


class Alone:
    """This process, which is every task there is."""

    task = ALONE
    index = 0

    def __init__(self) -> None:
        self._runs: dict[str, int] = {}
        #: What the program has reported, by name.
        self.results: dict[str, float] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that are alive: this one."""
        return (self.task,)

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Variables made inside live in this process, whatever the job."""
        yield

    def claim(
        self,
        run: str,
        total_steps: int,
        *,
        done: int = 0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] = {},
        more: bool = True,
    ) -> range:
        """All steps of the run at the first claim, then none."""
        first = self._runs.get(run, 0)
        self._runs[run] = total_steps
        return range(first, total_steps)

    def elect(self, what: str) -> bool:
        """True: there is nobody else to do it."""
        return True

    def report(self, name: str, value: float) -> None:
        """Keep a result."""
        self.results[name] = float(value)

    def close(self) -> None:
        """Do nothing; there is nobody to leave."""
