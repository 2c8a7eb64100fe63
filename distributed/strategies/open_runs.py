"""Runs that the program has neither finished nor closed: closed at the program's exit, before Python is torn down.

A program that takes results by `next(run)`, or leaves the loop at its last step with the run in a variable, keeps a
suspended generator. Its `close` reports the finished steps, and returns the others for other workers to claim.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
LOGGER = logging.getLogger("dflow")

#: By run, the identity of its strategy's cluster.
_open: weakref.WeakKeyDictionary[Generator[Any], int] = weakref.WeakKeyDictionary()


def closed_at_exit(run: Generator[T], cluster: Any) -> Generator[T]:
    """Return the run, which is closed with the cluster, or at the exit of the process, if it is still there."""
    _open[run] = id(cluster)
    # Again for each: it comes before the ends of clusters that the program has joined meanwhile.
    atexit.unregister(close_runs)
    atexit.register(close_runs)
    return run


def close_runs(cluster: Any = None) -> None:
    """Close the runs of a cluster that this process has not finished; by default all."""
    for run, owner in list(_open.items()):
        if cluster is None or owner == id(cluster):
            _close(run)


def _close(run: Generator[Any]) -> None:
    try:
        run.close()
    except Exception as error:  # of any kind: the other runs are closed too, and the cluster is left
        if not (isinstance(error, ValueError) and "already executing" in str(error)):  # by another thread
            LOGGER.error("a run that the program left open could not be closed", exc_info=error)
