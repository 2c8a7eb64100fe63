"""The part that all loggers share: from the values of a step to a call of `_write` in the logger's own thread.

Invariants: a value that is not computed is waited for in that thread alone. After the logger has been opened, nothing
that it meets ends the training: an odd metric, a full disk and a value that cannot be read are each a warning, once.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import operator
import sys
import time
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.detection.cluster_spec import SCRIPT_JOB
from dflow.distributed.training.metric_states import computed, is_state, named_results, on_host, states
from dflow.distributed.training.step_report import scalars
from dflow.loggers import writer_thread
from dflow.loggers.writer_thread import WriterThread
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import ConfigError, TrainingError
from dflow.tracing.source import caller, warn_at
from dflow.tracing.state.resources import is_variable
from dflow.trainer.callbacks import Callback
from dflow.trainer.evaluation_totals import EXAMPLES

#: Longest time that `log`, `flush` and `close` wait, in s.
FLUSH_S = 60.0
_LATE = f"expected all values to be computed and written within {FLUSH_S:g} s; some are not"


class Logger(Callback):
    """Writes metrics by step. A subclass defines `_open`, `_write`, and what else it needs of `_discard` to `_abandon`.

    where        the files' path or the server's address, for messages
    cluster      the result of `dflow.connect()`, for a loop by hand on a cluster; a trainer gives its own
    all_workers  whether each worker writes, apart from the others; by default the first of the job alone
    every        in a trainer: number of steps between the steps whose results are written, instead of means about once
                 a second
    """

    def __init__(self, where: str, cluster: Cluster | None, all_workers: bool, every: int | None) -> None:
        self._loc = caller()
        self._name, self._where = f"dflow.loggers.{type(self).__name__}", where
        self._check_period("every", every)
        self._all_workers, self._every = all_workers, every
        #: The worker's name in files and runs, empty if only one worker writes; and whether this one writes nothing.
        self._task, self._is_silent = "", False
        self._thread: WriterThread | None = None
        self._is_open = False
        #: Whether a step was logged. The first one replaces the values of earlier programs for it and later steps.
        self._has_begun = False
        self._last_step = 0
        #: Whether a trainer's run has begun and not ended.
        self._is_running = False
        #: Number of calls that failed since the last warning of failures, and whether one has succeeded since.
        self._lost, self._has_written = 0, False
        #: Number of calls that found no room in the queue since the last warning.
        self._dropped = 0
        self._warned: set[str] = set()
        self._to_warn: list[str] = []
        if cluster is not None:
            self._join(cluster)

    def log(self, step: int, values: Any) -> None:
        """Write the values of a step: real scalars and states of metrics by name, or one, which is then `loss`.

        The values need not be computed yet: a thread waits for them and writes them, about a second later. If 1000
        steps wait already, this waits for the oldest, for at most a minute; then values are lost, with a warning, until
        there is room again. The first call of a process replaces what earlier programs have written of this step and
        later ones. A value that is no real scalar is left out, with a warning.

        Raises TrainingError for a step that is no integer, and if the destination cannot be written.
        """
        self._log(self._checked_step(step), values, by_hand=True)

    def flush(self) -> None:
        """Wait until all is written, for at most a minute."""
        if self._thread is not None:
            if self._thread.flush(FLUSH_S):
                self._count_dropped()
            else:
                self._warn_once("late", _LATE)
        self._warn()

    def close(self) -> None:
        """Write all, and close what is open; the next `log` opens it again. A `with` statement does this too."""
        self._end(failed=self._is_running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end(failed=error is not None)

    def on_start(self, steps: int, cluster: Cluster) -> None:
        """Open the files, so that a destination that cannot be written is an error before the first step."""
        self._join(cluster)
        self._is_running, self._has_begun, self._last_step = True, False, steps
        if not self._is_silent:
            self._opened()

    def on_step(self, steps: int, outcome: Any) -> None:
        """Write the results of the step, if `every` steps have passed."""
        if not self._has_begun:
            self._begin(steps)
        if self._every is not None and steps // self._every != self._last_step // self._every:
            self._log(steps, outcome, by_hand=False)
        self._last_step = steps

    def on_metrics(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Write the means, unless the results of single steps are written."""
        if self._every is None:
            self._log(steps, metrics, by_hand=False)

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation as `evaluation/<name>`, without the number of its examples."""
        named = {f"evaluation/{name}": value for name, value in metrics.items() if name != EXAMPLES}
        self._log(steps, named, by_hand=False)

    def on_end(self, steps: int, reason: str) -> None:
        """Wait until all is written."""
        self._is_running = False
        self.flush()

    # What a subclass defines. All are called in the logger's thread, but `_shut` and the first `_open`.

    def _open(self) -> None:
        """Open the destination, and keep its present contents."""

    def _discard(self, first: int) -> None:
        """Replace what earlier programs have written of step `first` and later ones."""

    def _write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, logged at `time_s` seconds after the epoch. May raise anything."""
        raise NotImplementedError

    def _sync(self) -> None:
        """Hand what is written to the operating system or the server."""

    def _shut(self, failed: bool) -> None:
        """Close what is open, after all values are written; `failed` if the program ends by an error."""

    def _abandon(self) -> None:
        """After a failure: forget what is open, and clear `_is_open`, so that the next call opens it again."""

    # What subclasses use.

    def _put(self, step: int, write: Any, *arguments: Any) -> None:
        """Call `write(step, time_s, *arguments)` in the thread, if this worker writes at all."""
        if self._is_silent:
            return
        self._queue(partial(write, self._checked_step(step), time.time(), *arguments))
        self._warn()

    def _required(self, package: str, install: str) -> Any:
        """Import an optional package. Raises ConfigError without it."""
        try:
            return importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"{self._name}: expected the package {package}, which is not installed", f"pip install {install}"
            ) from error

    def _check_period(self, name: str, steps: int | None) -> None:
        if steps is not None and steps < 1:
            raise TrainingError(f"{self._name}: {name}: expected at least 1, got {steps}", "give a number of steps")

    def _checked_step(self, step: Any) -> int:
        try:
            return operator.index(step)
        except TypeError:
            raise TrainingError(
                f"{self._name}: step: expected an integer, got {_described(step)}", "write log(step, values)"
            ) from None

    def _warn_once(self, subject: str, text: str) -> None:
        """Have the program's thread warn, unless it has warned of `subject` before."""
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn_later(text)

    def _leave_out(self, name: str, value: Any, by_hand: bool) -> None:
        """Warn of a value that is no real scalar. A step may return arrays to a trainer for other uses."""
        if by_hand or not hasattr(value, "shape"):
            self._warn_once(name, f"metric {name!r}: expected a real scalar, got {_described(value)}; it is left out")

    # The rest is the base's own.

    def _join(self, cluster: Cluster) -> None:
        job, index = split_task_name(cluster.task)
        self._is_silent = index > 0 and not self._all_workers
        is_named = not cluster.is_standalone and (self._all_workers or job != SCRIPT_JOB)
        self._task = f"{job}-{index}" if is_named else ""

    def _log(self, step: int, values: Any, by_hand: bool) -> None:
        if self._is_silent:
            return
        if not self._has_begun and not self._begin(step):
            self._warn()
            return
        named = {str(name): value for name, value in named_results(values).items()}
        numbers = {name: fixed(value) for name, value in scalars(named)} | states(named)
        for name in named.keys() - numbers.keys():
            self._leave_out(name, named[name], by_hand)
        if numbers:
            self._put(step, self._write_numbers, numbers)
        self._warn()

    def _begin(self, step: int) -> bool:
        """Replace earlier values; return False if the thread has no room for that, so that the next step tries it."""
        self._has_begun = True  # before the wait, so that another thread does not begin too
        self._has_begun = self._is_silent or self._queue(partial(self._discard, step))
        return self._has_begun

    def _queue(self, write: Any) -> bool:
        """Call `write` in the thread; return whether the thread has room for it."""
        has_room = self._opened().put(partial(self._written, write), FLUSH_S)
        if has_room:
            self._count_dropped()
            return True
        if not self._dropped:
            self._warn_later(
                f"expected fewer than {writer_thread.MOST_WAITING} entries to wait, and they do for {FLUSH_S:g} s; "
                "later ones are lost"
            )
        self._dropped += 1
        return False

    def _count_dropped(self) -> None:
        """Have the program's thread warn of the number of calls that found no room."""
        if self._dropped:
            self._warn_later(f"{self._dropped} entries are lost, as they found no room in the queue")
            self._dropped = 0

    def _opened(self) -> WriterThread:
        """Return the thread, after opening the destination if it is not open."""
        if self._thread is None:
            try:
                self._open()
            except OSError as error:
                raise TrainingError(
                    f"{self._name}: expected a place that can be written, got {self._where}: {error.strerror or error}",
                    "give another one, or make it writable",
                    at=self._loc,
                ) from error
            self._is_open = True
            self._thread = WriterThread(self._name, self._synced, self._failed)
            atexit.register(self._end_at_exit)
        return self._thread

    def _write_numbers(self, step: int, time_s: float, values: Mapping[str, Any]) -> None:
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers |= computed(name, on_host(value)) if is_state(value) else {name: float(value)}
            except Exception as error:  # a computation that failed, or an array that was donated
                self._warn_once(name, f"metric {name!r} could not be read: {error}")
        if numbers:
            self._write(step, time_s, numbers)

    def _written(self, write: Any) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True
        write()
        self._has_written = True

    def _synced(self) -> None:
        if self._is_open:
            self._sync()
        if self._lost and self._has_written:
            self._warn_later(f"writes again; {self._lost} entries are lost")
            self._lost = 0

    def _failed(self, error: Exception) -> None:
        if not self._lost:
            self._warn_later(
                f"expected to write, got {type(error).__name__}: {error}; training goes on, and what cannot be written "
                "is lost"
            )
        self._lost, self._has_written = self._lost + 1, False
        with contextlib.suppress(OSError):  # the failure again
            self._abandon()

    def _warn_later(self, text: str) -> None:
        """Have the program's thread warn: the logger's own has no line of the user."""
        self._to_warn.append(f"{self._name}: {self._where}: {text}")

    def _warn(self) -> None:
        while self._to_warn:
            warn_at(self._loc, self._to_warn.pop(0), RuntimeWarning)

    def _end(self, failed: bool) -> None:
        atexit.unregister(self._end_at_exit)
        if (thread := self._thread) is not None:
            self._thread = None
            has_written = thread.flush(FLUSH_S)
            self._count_dropped()
            if not has_written:
                self._warn_once("late", _LATE)
            elif thread.close(FLUSH_S) and self._is_open:
                try:
                    self._shut(failed)
                except Exception as error:
                    self._failed(error)
            self._is_open = False
        self._warn()

    def _end_at_exit(self) -> None:
        # The interpreter has set this if an error ends the program.
        self._end(failed=self._is_running or hasattr(sys, "last_value"))


def fixed(value: Any) -> Any:
    """Return a value that the program does not change later."""
    if is_variable(value):
        return value.read()
    return value.copy() if isinstance(value, np.ndarray) else value


def renamed(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return numbers by names that are none of `step` and `time`: with a `_` after these."""
    return {f"{name}_" if name in ("step", "time") else name: value for name, value in numbers.items()}


def _described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def plain_hyperparameters(name: str, given: Mapping[str, Any] | None) -> dict[str, str | bool | int | float]:
    """Return hyperparameters with other values as text, and a nested mapping as `outer/inner`.

    Raises TrainingError if they are no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TrainingError(
            f"{name}: hyperparameters: expected values by name, got {given!r}", 'give {"learning_rate": 0.1}'
        )
    found: dict[str, str | bool | int | float] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            found.update({f"{key}/{inner}": plain for inner, plain in plain_hyperparameters(name, value).items()})
        else:
            found[str(key)] = _plain(value)
    return found


def _plain(value: Any) -> str | bool | int | float:
    if isinstance(value, np.generic) or getattr(value, "shape", None) == ():
        value = np.asarray(value).item()
    return value if isinstance(value, str | bool | int | float) else str(value)
