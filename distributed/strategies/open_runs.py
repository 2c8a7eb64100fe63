"""Runs that the program has neither finished nor closed: closed at the program's exit, before Python is torn down.

A program that takes results by `next(run)`, or leaves the loop at its last step with the run in a variable, keeps a
suspended generator. Its `close` reports the finished steps, and returns the others for other workers to claim.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

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
            with contextlib.suppress(ValueError):  # another thread runs it
                run.close()
