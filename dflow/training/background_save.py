"""One save that a thread writes while training goes on. Its failure is kept until `check` raises it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dflow.lowering.files.object_path import Location
from dflow.tracing.errors import CheckpointError, DeadlineExceeded
from dflow.tracing.source import caller

LOGGER = logging.getLogger("dflow")


class BackgroundSave:
    """A running or ended save of the checkpoint `location`.

    work       writes the checkpoint
    timeout_s  time after which a save that still runs is an error
    """

    def __init__(self, location: Location, work: Callable[[], None], timeout_s: float) -> None:
        self._location, self._timeout_s = location, timeout_s
        self._loc, self._until_s = caller(), time.monotonic() + timeout_s
        self._ended = threading.Event()
        self._error: BaseException | None = None
        try:
            # Not a daemon: when the program ends, the interpreter waits for the save.
            threading.Thread(target=self._run, args=(work,), name="dflow save").start()
        except RuntimeError:  # the system, or an interpreter that shuts down, starts no thread
            self._run(work)

    def _run(self, work: Callable[[], None]) -> None:
        # `work` has the captured values, so it must not outlive the save.
        try:
            work()
        except BaseException as error:
            self._error = error
            LOGGER.error("%s was not saved: %s", self._location, error)  # the program may never call again
        finally:
            self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether the thread still writes."""
        return not self._ended.is_set()

    def check(self) -> None:
        """Raise CheckpointError if the save has failed, the first time; DeadlineExceeded if it runs too long."""
        if self.is_running:
            if time.monotonic() > self._until_s:
                raise DeadlineExceeded(
                    f"{self._location}: expected the save to end within {self._timeout_s:g} s, and it still runs",
                    "see whether the disk or store answers, or give the manager a longer timeout_s",
                    at=self._loc,
                )
            return
        error, self._error = self._error, None
        if error is not None:
            fact = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{self._location}: expected to be saved, got: {fact}",
                "training and the older checkpoints are unharmed; remove the cause, and save again",
                at=self._loc,
            ) from error

    def wait(self) -> None:
        """Wait until the save ends, then `check`."""
        self._ended.wait(max(0.0, self._until_s - time.monotonic()) + 0.001)
        self.check()
