"""Runs that the program has neither finished nor closed: closed with their cluster, or at the program's exit.

A program that takes results by `next(run)`, or leaves the loop at its last step with the run in a variable, keeps a
suspended generator. Its `close` reports the finished steps, and returns the others for other workers to claim. At the
exit that comes before Python is torn down. A program that closes the cluster within its loop over a run gets an error
from the loop, unless it had the result of the last step.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Generator
from contextlib import closing
from typing import Any, TypeVar

from dflow.distributed.cluster.cluster import Cluster
from dflow.tracing.errors import StrategyError
from dflow.tracing.source import caller

T = TypeVar("T")
LOGGER = logging.getLogger("dflow")


class OpenRun:
    """The state of a run that the program iterates over."""

    def __init__(self) -> None:
        #: Whether the program has the result of the last step, or gets it next.
        self.is_at_end = False
        #: Whether the cluster was closed before the end of the run.
        self._is_closed = False
        self._results: Generator[Any] | None = None

    def of(self, name: str, results: Generator[T]) -> Generator[T]:
        """Yield the results of the run `name`.

        Raises StrategyError in place of the next one if the cluster was closed, unless `is_at_end`.
        """
        self._results = results
        with closing(results):
            while not self._is_closed:
                try:
                    result = next(results)
                except StopIteration:
                    break
                yield result
        if self._is_closed and not self.is_at_end:
            raise StrategyError(
                f"run {name!r}: expected an open cluster until its last step, got cluster.close() in the loop",
                "close the cluster after the loop, which break ends early",
                at=caller(),
            )

    def close(self) -> None:
        """End the run, since its cluster is closed; after its present step, if that runs, as in another thread."""
        self._is_closed = True
        if self._results is not None:
            self._results.close()


class OpenRuns:
    """The runs of a cluster that the program has not finished."""

    def __init__(self, cluster: Cluster) -> None:
        self._open: weakref.WeakKeyDictionary[Generator[Any], OpenRun] = weakref.WeakKeyDictionary()

    def add(self, run: Generator[T], opened: OpenRun) -> Generator[T]:
        """Register a run, and return it: it is closed at the exit of the process, or `opened` with the cluster."""
        self._open[run] = opened
        # Again for each: it comes before the ends of clusters that the program has joined meanwhile.
        atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)
        return run

    def close(self) -> None:
        """Close the runs when their cluster closes; log errors in place of raising them."""
        atexit.unregister(self._close_at_exit)
        for opened in list(self._open.values()):
            _close(opened)

    def _close_at_exit(self) -> None:
        for run in list(self._open):
            _close(run)


def _close(run: Generator[Any] | OpenRun) -> None:
    try:
        run.close()
    except Exception as error:  # of any kind: the other runs are closed too, and the cluster is left
        if not (isinstance(error, ValueError) and "already executing" in str(error)):  # by another thread
            LOGGER.error("a run that the program left open could not be closed", exc_info=error)
