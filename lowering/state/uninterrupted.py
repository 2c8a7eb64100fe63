"""Changes that an interrupt cannot divide, without a lock or a look at signals in each call.

CPython runs the handler of a signal, which may raise KeyboardInterrupt, at three points only: as a Python function
begins, after a call, and as a loop repeats. So an interrupt comes before or after, and never within,

- one call of a function in C, such as `dict.update`, and `call_into` below;
- lines from one call to the next: assignments and branches. They are marked "no call".

`tests/dflow/calls/test_interrupts.py` raises an interrupt at each of these points in the files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any


def call_into(results: list[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Append `call(*args)` to `results`. If `call` is in C, an interrupt finds the result there, or no call made.

    An assignment of the result would come after the point where the interrupt is raised, and the result be lost:
    a program has deleted the old values by then.
    """
    results.extend(starmap(call, (args,)))
