"""The step of a training run that a thread is in, so that the log of traces knows a trace that delays a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_present = threading.local()


@contextmanager
def in_step(number: int) -> Iterator[None]:
    """Return the context of a step of a run on this thread; `number` counts those of the loop, from 0."""
    before, _present.number = getattr(_present, "number", None), number
    try:
        yield
    finally:
        _present.number = before


def is_in_later_step() -> bool:
    """Return whether this thread is in a step of a run, after the first one of its loop."""
    return bool(getattr(_present, "number", None))
