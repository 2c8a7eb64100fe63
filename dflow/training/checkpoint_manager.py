"""`dflow.CheckpointManager`: saves beside training, keeps the right checkpoints, and resumes from the newest.

Values are captured at one moment by the calling thread; a thread writes them. Invariants: at most one save runs; old
checkpoints are deleted only after the new one is complete; a failed save is raised by the next call.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import msgspec

from dflow.distributed.process.termination import Terminated
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.owned_folder import whole_location
from dflow.tracing.errors import CheckpointError, DflowError
from dflow.tracing.near_names import did_you_mean, suggests_keywords
from dflow.training.background_save import BackgroundSave
from dflow.training.checkpoint_folder import CheckpointFolder, ManagerMetadata, this_process
from dflow.training.group_saving import check_seen
from dflow.training.named_arrays import Names, named_variables
from dflow.training.resuming import resume
from dflow.training.retention import Best, Checkpoint, deleted
from dflow.training.save_roles import role_of
from dflow.training.save_schedule import RunRecord, SaveSchedule
from dflow.training.saving import WriteCheckpoint, captured, given_location

LOGGER = logging.getLogger("dflow")


class CheckpointManager:
    """A folder of checkpoints of one run; making it restores the newest one.

    folder        a path, or a URL as for `dflow.save`; holds a checkpoint `step_N` for each saved step N
    variables     as for `dflow.save`
    every         when `step` saves: a number of steps between saves, a timedelta, or "auto", the interval that loses
                  the least work and time, by Young and Daly
    keep          number of newest checkpoints to keep
    best          further ones to keep: (metric, count, "min" or "max"); the latter may be left out for a name that says
                  which values are better, as for `EarlyStopping`
    keep_one_per  a further one to keep for good in each period of this length of the run, a timedelta
    mtbf          expected mean time between failures for "auto", before the folder's runs have seen any
    names         as for `dflow.save`
    timeout_s     longest time of a save, in s; the calls after it raise DeadlineExceeded

    On a cluster every worker makes the same manager. Worker 0 restores and saves; on the others `step`, `save` and
    `wait` do nothing. Of the variables of `AllReduce` each worker restores and saves its own parts: all workers call
    `step` with the same numbers, and `every` is a number of steps. When SIGTERM ends a loop of `AllReduce` or `Hybrid`,
    the end of the manager's `with` block saves the last step. Only one thread may use a manager.

    Raises CheckpointError if another manager uses the folder, if the disk refuses it, or if its checkpoint is of other
    variables, with a table; DamagedCheckpoint if no checkpoint in it can be read.
    """

    @suggests_keywords
    def __init__(
        self,
        folder: str | os.PathLike[str],
        variables: Any,
        *,
        every: int | timedelta | str = "auto",
        keep: int = 3,
        best: tuple[str, int, str] | tuple[str, int] | None = None,
        keep_one_per: timedelta | None = None,
        mtbf: timedelta = timedelta(days=1),
        names: Names | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._folder = CheckpointFolder(given_location(folder, "CheckpointManager"))
        #: Longest time of a save, in s.
        self.timeout_s = timeout_s
        self._named = named_variables(variables, names, "CheckpointManager")
        self._period = None if keep_one_per is None else _period("keep_one_per", keep_one_per)
        self._keep, self._best = _positive("keep", keep), Best.parsed(best)
        self._schedule = SaveSchedule(every, _period("mtbf", mtbf))
        #: When `step` saves, as given.
        self.every = every
        self._role = role_of(self._named, self._folder.path, every)
        #: Whether worker 0 saves for the other workers, on which `save` does nothing.
        self.is_shared = self._role.is_shared
        #: Whether all variables are on tasks, and none in this process.
        self.is_on_tasks = not self._role.has_own
        self._save: BackgroundSave | None = None
        self._is_closed = self._is_reported = False
        self._record = RunRecord()
        #: Time that the earlier runs took until their last checkpoint.
        self._ran_s = 0.0
        #: Number of the next step: one after the restored one, or 0. Where the tasks have the state of a snapshot, one
        #: after the last step saved before it: the run of a strategy, which counts its steps itself, may be further.
        self.next_step = self._resume()
        #: The last step whose save was begun, and the last one whose checkpoint is complete.
        self._last = self._complete = self.next_step - 1
        #: The arguments of the last call of `step`.
        self._noted: tuple[int, Mapping[str, Any] | None] = self._last, None
        self._started_s = self._saved_s = time.monotonic()
        weakref.finalize(self, _left, self._folder, os.getpid())

    @property
    def resumed(self) -> int | None:
        """The step whose checkpoint was restored, or the last one saved before the tasks' snapshot; or None."""
        return self.next_step - 1 if self.next_step else None

    @property
    def best_metric(self) -> str | None:
        """The metric of `best=`, if given."""
        return self._best.metric if self._best else None

    @property
    def last_step(self) -> int:
        """The last step whose save was begun, on a cluster by worker 0; -1 without any. Other workers ask a task."""
        shared = None if self._role.is_saver else self._role.next_step()
        return self._last if shared is None else shared - 1

    @property
    def interval_s(self) -> float | None:
        """Time between two saves by `step`, in s; None for a number of steps, and before "auto" has measured a save."""
        return self._schedule.interval_s(self._record)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The complete checkpoints in the folder, oldest first."""
        return tuple(self._folder.checkpoints())

    @property
    def best(self) -> Checkpoint | None:
        """The best checkpoint by the metric of `best=`; None if none has that metric."""
        return next(iter(self._best.of(self.checkpoints)), None) if self._best else None

    def should_save(self, step: int) -> bool:
        """Return whether `step` would save now. Not while a save runs: the next one starts after its end."""
        self._check_open()
        self._folder.files.check()
        if self._save is not None:
            self._save.check()
        is_busy = self._save is not None and self._save.is_running
        if not self._role.is_together and (is_busy or not self._role.is_saver):
            return False
        return self._schedule.is_due(int(step), self._last, time.monotonic() - self._saved_s, self.interval_s)

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save if it is time to, beside training; return whether a save has begun. Call it after each step."""
        self._noted = int(step), metrics
        is_due = self.should_save(step)
        if is_due and self._role.is_together:
            self.save(step, metrics)  # waits for an earlier save: all processes save at the same steps
        elif is_due:
            self._begin(step, metrics)
        return is_due

    def save(
        self,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[str, float] | None = None,
        is_finite: bool = True,
    ) -> None:
        """Save the values of this moment as the checkpoint of `step`, beside training.

        metrics    numbers by name, stored with the checkpoint, for `best`
        extra      further numbers by name, stored with the checkpoint
        is_finite  whether all losses of the run were finite until now; the newest such checkpoint is not deleted

        Waits until an earlier save ends. Raises CheckpointError if that has failed, or for a step that is not after the
        last one.
        """
        self.wait()
        if self._role.is_saver or self._role.is_together:
            self._begin(step, metrics, extra, is_finite=is_finite)

    def passed(self, step: int) -> None:
        """Note that `step`, which was saved before the tasks returned to a snapshot, is done again."""
        if self._role.is_saver and (self._role.next_step() or 0) <= step:
            self._role.set_next_step(step + 1)

    def wait(self) -> None:
        """Wait until the running save, if any, is on the disk. Raises CheckpointError if it fails."""
        self._check_open()
        if self._save is not None:
            self._save.wait()
        self._folder.files.check()

    def close(self) -> None:
        """Wait for the running save, and release the folder. Raises CheckpointError if the save fails."""
        self._end(has_failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if isinstance(error, Terminated) and error.is_agreed and self._noted[0] > self._last:
                self.save(*self._noted)
            self._end(has_failed=isinstance(error, Exception))
        except DflowError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
            if isinstance(error, Terminated):  # whose notes are not printed
                LOGGER.error("the last step was not saved: %s", failure)

    def _resume(self) -> int:
        """Restore the newest checkpoint, or wait until worker 0 has; return the next step."""
        if not self._role.is_saver:
            return resume(self._folder, self._named, self._role, self.timeout_s)
        self._folder.lock()
        try:
            found = resume(self._folder, self._named, self._role, self.timeout_s)
            self._ran_s = max((one.ran_s for one in self.checkpoints), default=0.0)
            self._record = self._folder.record().begun(this_process())
            self._folder.write_record(self._record)
        except BaseException:
            self._folder.release()
            raise
        return found

    def _begin(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        extra: Mapping[str, float] | None = None,
        *,
        is_finite: bool = True,
    ) -> None:
        """Capture the values, and start the thread that writes them."""
        number = self._checked_step(step)
        began_s = time.monotonic()
        ran_s = self._ran_s + began_s - self._started_s
        numbers = {name: float(number) for name, number in (extra or {}).items()}  # NumPy's too
        about = ManagerMetadata(time.time(), self._checked_metrics(metrics), ran_s, numbers, is_finite)
        metadata = {"manager": msgspec.to_builtins(about)}
        with ExitStack() as stack:
            channel, what = f"the saves in {self._folder.path}", f"the save of {self._folder.location(number)}"
            write = stack.enter_context(captured(self._named, what, channel=channel, timeout_s=self.timeout_s))
            self._role.set_next_step(number + 1)
            self._last, self._saved_s = number, began_s
            capture = stack.pop_all()
        self._save = BackgroundSave(
            self._folder.location(number),
            lambda: self._write(number, capture, write, metadata, began_s),
            self.timeout_s,
        )

    def _write(
        self, step: int, capture: ExitStack, write: WriteCheckpoint, metadata: Mapping[str, Any], began_s: float
    ) -> None:
        """Write a checkpoint, delete the old ones, and record the time that it took."""
        with capture:
            write(self._opened(step), metadata)
        self._complete = step
        if not self._role.is_saver:
            if not any(one >= step for one in self._folder.steps()):  # a later save may have deleted it
                check_seen(self._folder.location(step))
            return
        for one in deleted(self._folder.checkpoints(), self._keep, self._best, self._period):
            self._folder.remove(one.step)
        now_s = time.monotonic()
        self._set_record(self._record.saved(now_s - began_s, now_s - self._started_s))

    @contextmanager
    def _opened(self, step: int) -> Iterator[Location]:
        """Return the context of the folder to write a checkpoint into, which is in place after it."""
        with whole_location(self._folder.location(step)) as folder:
            yield folder
            self._folder.files.renew()

    def _set_record(self, record: RunRecord) -> None:
        self._record = record
        if self.every == "auto" and record.save_s and not self._is_reported:
            self._is_reported = True
            why = self._schedule.reason(record)
            LOGGER.info("%s: a save every %.3g s, since %s", self._folder.path, self.interval_s, why)
        try:
            self._folder.write_record(record)
        except CheckpointError as error:  # the checkpoint itself is complete
            LOGGER.warning("the record of runs is not written: %s", error)

    def _checked_step(self, step: int) -> int:
        number = operator.index(step)
        if number <= self._complete:
            raise CheckpointError(
                f"step: expected a number after {self._complete}, the last one of {self._folder.path}, got {number}",
                "count on from manager.next_step, or give the manager another folder",
            )
        return number

    def _checked_metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        found = {}
        for name, value in (metrics or {}).items():
            try:
                found[name] = float(value)
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"metrics[{name!r}]: expected a number, got {value!r}", "give numbers or scalar arrays"
                ) from error
        if found and self.best_metric is not None and self.best_metric not in found:
            raise CheckpointError(
                f"metrics: expected {self.best_metric!r}, the metric of best=, got {sorted(found)}",
                did_you_mean(self.best_metric, found, "give that metric too, or correct best="),
            )
        return found

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(
                f"{self._folder.path}: expected an open CheckpointManager, got a closed one", "make a new one"
            )

    def _end(self, *, has_failed: bool) -> None:
        """Wait for the running save and release the folder; a run that has failed stays marked as running."""
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._is_closed = True
            if self._role.is_saver and not has_failed:
                self._set_record(self._record.ended(time.monotonic() - self._started_s))
            self._folder.release()


def _left(folder: CheckpointFolder, process: int) -> None:
    """Release the folder of a manager that was not closed, as the program ends; by an error, the run has failed."""
    if folder.is_locked and os.getpid() == process:
        if not hasattr(sys, "last_type"):  # Python sets it when it prints the error that ends the program
            with suppress(CheckpointError):
                folder.write_record(folder.record().ended())
        folder.release()


def _positive(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise CheckpointError(f"{name}: expected a number of checkpoints, at least 1, got {given!r}", f"give {name}=3")
    return given


def _period(name: str, given: Any) -> timedelta:
    if not isinstance(given, timedelta) or given <= timedelta():
        raise CheckpointError(
            f"{name}: expected a timedelta above 0, got {given!r}", f"give it like {name}=timedelta(hours=6)"
        )
    return given
