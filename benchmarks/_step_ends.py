"""The times when training steps have ended, one file for each process that trains.

The clock is `time.monotonic`, which all processes of a machine share. A time is written without a buffer, so the file
outlives the process that is killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class StepEnds:
    """The times in `folder`. A file is named after a task and its process, such as `worker:0.1234`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder

    def of(self, task: str = "") -> dict[int, npt.NDArray[Any]]:
        """Return the times of each process of a task, or of all tasks, that has ended a step; by process id."""
        files = [file for file in self.folder.iterdir() if file.name.startswith(task)]
        found = {int(file.suffix[1:]): np.fromfile(file, count=file.stat().st_size // 8) for file in files}
        return {process: times for process, times in found.items() if len(times)}

    def since(self, from_s: float) -> int:
        """Return the number of processes that have ended a step since then."""
        return sum(bool(times[-1] > from_s) for times in self.of().values())

    def first_of(self, task: str, from_s: float) -> float | None:
        """Return the first step of a process of the task that has ended none before then."""
        return min((float(times[0]) for times in self.of(task).values() if times[0] > from_s), default=None)

    def longest_pause(self, from_s: float, to_s: float) -> float:
        """Return the longest time without the end of a step in any process that has trained since then, and runs."""
        running = [times for process, times in self.of().items() if Path(f"/proc/{process}").exists()]
        parts = [times[(times > from_s) & (times < to_s)] for times in running if times[0] < from_s]
        return max(float(np.diff([from_s, *part, to_s]).max()) for part in parts)

    def end_of_longest_pause(self, from_s: float) -> float:
        """Return the end of the longest time since then without the end of a step of any process."""
        times = np.sort(np.concatenate([*self.of().values()]))
        times = np.concatenate([[from_s], times[times > from_s]])
        return float(times[1 + np.diff(times).argmax()])
