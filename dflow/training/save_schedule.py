"""When to save: after a number of steps, after a time, or at the interval of Young and Daly.

A shorter interval spends more time on saves, a longer one loses more work in a failure. Young (1974) and Daly (2006)
give the interval with the least sum of both. It needs the time of a save, which is measured, and the mean time between
failures, which is estimated from the record of the folder's runs.
"""

from __future__ import annotations

import math
import statistics
from datetime import timedelta
from typing import Annotated, Any

import msgspec

from dflow.tracing.errors import CheckpointError

#: Number of measured saves that the record keeps.
_SAVES = 5
#: A record with other numbers is damaged.
_NOT_NEGATIVE = msgspec.Meta(ge=0)
_Time = Annotated[float, _NOT_NEGATIVE]


class RunRecord(msgspec.Struct, frozen=True):
    """What the runs that saved into a folder have seen.

    failures   number of runs that ended without closing their manager
    ran_s      time that all ended runs took, in s; of a failed run, until its last save
    save_s     times of the last saves, in s
    running    the process of the current run; None if its manager is closed
    running_s  time of the current run until its last save, in s
    """

    failures: Annotated[int, _NOT_NEGATIVE] = 0
    ran_s: _Time = 0.0
    save_s: tuple[_Time, ...] = ()
    running: str | None = None
    running_s: _Time = 0.0

    def begun(self, process: str) -> RunRecord:
        """Return the record after the start of a run. If the one before was not closed, it has failed."""
        ended = self.ended()
        failures = self.failures + (self.running is not None)
        return msgspec.structs.replace(ended, failures=failures, running=process)

    def saved(self, took_s: float, running_s: float) -> RunRecord:
        """Return the record after a save of the current run."""
        return msgspec.structs.replace(self, save_s=(*self.save_s, took_s)[-_SAVES:], running_s=running_s)

    def ended(self, running_s: float | None = None) -> RunRecord:
        """Return the record after the current run; `running_s` is its time, if longer than until its last save."""
        running_s = self.running_s if running_s is None else running_s
        return msgspec.structs.replace(self, ran_s=self.ran_s + running_s, running=None, running_s=0.0)

    def failure_interval_s(self, prior_s: float) -> float:
        """Return the estimated mean time between failures; `prior_s` counts as one failure seen in that time."""
        return (prior_s + self.ran_s + self.running_s) / (1 + self.failures)


def daly_interval_s(save_s: float, failure_interval_s: float) -> float:
    """Return the time between two saves that loses the least, by Daly's higher-order formula, at least `save_s`."""
    if save_s >= 2 * failure_interval_s:
        return max(save_s, failure_interval_s)
    ratio = save_s / (2 * failure_interval_s)
    return max(save_s, math.sqrt(2 * save_s * failure_interval_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s)


class SaveSchedule:
    """Decides which calls of `CheckpointManager.step` save.

    every   a number of steps, a time, or "auto": the interval of Young and Daly
    prior   expected time between failures, for "auto", before any is seen
    """

    def __init__(self, every: Any, prior: timedelta) -> None:
        match every:
            case "auto":
                pass
            case int() if not isinstance(every, bool) and every >= 1:
                pass
            case timedelta() if every > timedelta():
                pass
            case _:
                raise CheckpointError(
                    f"every: expected a number of steps, a timedelta or 'auto', got {every!r}",
                    "give it like every=100, every=timedelta(minutes=10) or every='auto'",
                )
        self.every: int | timedelta | str = every
        self._prior_s = prior.total_seconds()

    def interval_s(self, record: RunRecord) -> float | None:
        """Return the time between saves, in s; None for a number of steps, and as long as no save has been measured."""
        if isinstance(self.every, timedelta):
            return self.every.total_seconds()
        if isinstance(self.every, int) or not record.save_s:
            return None
        return daly_interval_s(statistics.median(record.save_s), record.failure_interval_s(self._prior_s))

    def is_due(self, step: int, last: int, elapsed_s: float, interval_s: float | None) -> bool:
        """Whether to save step `step`, after step `last` (-1: none) was saved or restored `elapsed_s` ago.

        With a number of steps: if `step` is a multiple of it, or one lies in between. With "auto" and no interval yet,
        the first step is saved, to measure it.
        """
        if isinstance(self.every, int):
            return step // self.every > last // self.every
        return interval_s is None or elapsed_s >= interval_s

    def reason(self, record: RunRecord) -> str:
        """Return why "auto" has its interval."""
        failures = "1 failure" if record.failures == 1 else f"{record.failures} failures"
        ran_h = (record.ran_s + record.running_s) / 3600
        return (
            f"a save takes {statistics.median(record.save_s):.2g} s, and a failure is expected every "
            f"{record.failure_interval_s(self._prior_s) / 3600:.3g} h ({failures} in {ran_h:.3g} h of runs that saved "
            f"here, and one assumed in {self._prior_s / 3600:.3g} h)"
        )
