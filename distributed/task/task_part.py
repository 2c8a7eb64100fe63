"""A part of a task: what one subject, such as synchronous training, does on each task.

Why: a task server runs plans and knows no strategy. A subject adds a part in its own folder, with its messages, and
`task_role.py` lists the parts of a task. A part is made from the `TaskServer`, whose attributes it may use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.task.arrivals import Arrival, RequestTable
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.tracing.errors import DflowError


class TaskPart:
    """The base of the parts of a task: each method does nothing, and a part overrides the methods that it needs.

    They are called for one part after the other, in the order of the task's list.
    """

    #: The handlers of the part's messages, called after the checks that the sender is a member and speaks for itself.
    requests: ClassVar[RequestTable[Any]] = RequestTable()
    notices: ClassVar[HandlerTable[Any, Arrival, None]] = HandlerTable()
    #: The name of the part's state in snapshots, empty for none, and the type of its copy, which msgspec converts.
    saved_as: ClassVar[str] = ""
    copied: ClassVar[Any] = tuple[()]

    def follow(self, session: SessionDriver) -> None:
        """Register for notices of the coordinator, before the task joins the cluster."""

    def left(self, task: str) -> None:
        """Stop using a task that left the cluster or was started again; its steps are cancelled already."""

    def copy(self) -> Sequence[Any]:
        """Return a copy of the part's state for a snapshot, while no step runs. Raises CheckpointError."""
        return ()

    def return_to(self, copy: Iterable[Any], epoch: int) -> None:
        """Return to a copy of the part's state, empty for a task or part without one, after the variables have.

        epoch  number of returns of all tasks to a snapshot, including this one
        """

    def close(self, error: DflowError) -> None:
        """Answer all waiting requests with `error`, as the task closes."""
