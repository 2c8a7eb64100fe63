"""Metrics as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from dflow.distributed.cluster.cluster import Cluster
from dflow.loggers.logger import Logger
from dflow.tracing.near_names import suggests_keywords


class Print(Logger):
    """Prints a line for each step that is logged, such as `step 100: loss 0.0123, evaluation/loss 0.0145`.

    file         where to; by default standard output
    cluster, all_workers, every  as for `TensorBoard`
    """

    @suggests_keywords
    def __init__(
        self,
        file: TextIO | None = None,
        *,
        cluster: Cluster | None = None,
        all_workers: bool = False,
        every: int | None = None,
    ) -> None:
        super().__init__(
            "standard output" if file is None else str(getattr(file, "name", file)), cluster, all_workers, every
        )
        self._file = file

    def _write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        task = f"{self._task} " if self._task else ""
        text = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        print(f"{task}step {step}: {text}", file=self._file, flush=True)
