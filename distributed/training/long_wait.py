"""A worker's wait for other workers: it logs a warning while it lasts, and has a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded

LOGGER = logging.getLogger("dflow")

#: Wait after which a worker logs the missing workers; the interval then doubles each time, in s.
NOTICE_AFTER_S = 10.0

Answer = TypeVar("Answer")


def waited_for(
    task: str, timeout_s: float, ask: Callable[[float], Answer], more: Callable[[], str] = lambda: ""
) -> Answer:
    """Return `ask(wait_s)`, which waits for other workers. When it raises DeadlineExceeded, log that and ask again.

    After `timeout_s`, raises DeadlineExceeded.

    task   the worker that waits
    more   returns a text to append to each error
    """
    began_at = time.monotonic()
    wait_s = min(NOTICE_AFTER_S, timeout_s)
    while True:
        try:
            return ask(wait_s)
        except DeadlineExceeded as error:
            waited_s = time.monotonic() - began_at
            whole = f"{error}{more()}"
            if waited_s >= timeout_s:
                raise DeadlineExceeded(whole) from None
            LOGGER.warning("%s waits, for %.0f s: %s", short_task_name(task), waited_s, whole)
            wait_s = min(2 * wait_s, timeout_s - waited_s)
