"""Metrics as a CSV file: a row for each step that is logged.

The columns are `step`, `time` and one for each metric. A metric that is logged for the first time adds a column, for
which the file is written again. Invariant: the file on disk is whole at any time, up to its last row.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from dflow.distributed.cluster.cluster import Cluster
from dflow.loggers.logger import Logger, renamed
from dflow.tracing.errors import TrainingError
from dflow.tracing.near_names import suggests_keywords

_STEP_AND_TIME = ["step", "time"]


class CSV(Logger):
    """Writes metrics to a CSV file, with the columns `step`, `time` (in s since 1970) and one for each metric.

    path         the file; with `all_workers` its name has the worker's too, such as `metrics.worker-1.csv`
    cluster, all_workers, every  as for `TensorBoard`

    A row has the values that are logged together, and nothing for other metrics. A metric called `step` or `time` has
    the column `step_` or `time_`. A program that is started again goes on in the file: the rows of its first step and
    of later ones are replaced.

    Raises TrainingError if the file cannot be written, or was not written by this class.
    """

    @suggests_keywords
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cluster: Cluster | None = None,
        all_workers: bool = False,
        every: int | None = None,
    ) -> None:
        super().__init__(os.fspath(path), cluster, all_workers, every)
        self._given = Path(path)
        self._file: TextIO | None = None
        self._columns: list[str] = []

    @property
    def _path(self) -> Path:
        return self._given.with_suffix(f".{self._task}{self._given.suffix}") if self._task else self._given

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(self._rows(), _STEP_AND_TIME)

    def _discard(self, first: int) -> None:
        self._sync()  # rows of an earlier run of this process
        rows = self._rows()
        kept = [row for row in rows if int(row["step"]) < first]
        if len(kept) < len(rows):
            self._rewrite(kept, self._columns)

    def _write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        row = {"step": str(step), "time": f"{time_s:.3f}"} | {
            name: repr(value) for name, value in renamed(numbers).items()
        }
        if row.keys() <= {*self._columns}:
            assert self._file is not None
            csv.DictWriter(self._file, self._columns, lineterminator="\n").writerow(row)
        else:
            self._sync()
            self._rewrite([*self._rows(), row], self._columns)

    def _sync(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _shut(self, failed: bool) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _abandon(self) -> None:
        self._is_open = False
        self._shut(failed=True)

    def _rows(self) -> list[dict[str, str]]:
        """Return the rows of the file, without a last one that a killed program left unfinished."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(whole.splitlines(keepends=True))
        if whole and (reader.fieldnames or [])[:2] != _STEP_AND_TIME:
            raise TrainingError(
                f"{self._name}: {self._path}: expected a file with the columns step and time, got "
                f"{', '.join(reader.fieldnames or []) or 'none'}",
                "give another path: other programs' files are not replaced",
                at=self._loc,
            )
        return [row for row in reader if None not in row and None not in row.values()]

    def _rewrite(self, rows: list[dict[str, str]], columns: Iterable[str]) -> None:
        """Replace the file by one with these rows, and open it to add others."""
        self._columns = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        new = self._path.with_name(f".{self._path.name}.new")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        self._shut(failed=False)
        new.replace(self._path)
        self._file = self._path.open("a", newline="")
