"""Tasks that hold variables, queues and accumulators, as the coordinator decides."""

from __future__ import annotations

from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.message import Marked, Message, Request


class Placed(Marked, frozen=True):
    """The task that holds the variable, and its `process`, empty until the task has joined.

    Snapshots have its state if it `is_saved`.
    """

    task: str
    process: str = ""
    is_saved: bool = False


class PlaceVariable(Request[Placed], frozen=True):
    """Choose the task that holds a variable; answered by `Placed`, the same for every requester.

    `job`   job over whose tasks variables are spread
    `near`  name of a placed variable whose task this one must share, or empty
    `kind`  "variable", or the kind of another resource, such as a queue, whose `dtype` lists all its settings
    `on`    task that must hold it, or empty for any

    Snapshots have its state if it `is_saved`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    job: str
    near: str = ""
    kind: str = "variable"
    on: str = ""
    is_saved: bool = True


class PlacedAll(Message, frozen=True):
    """The answers, in the order of the requests."""

    answers: tuple[Placed | Failure, ...]


class PlaceVariables(Request[PlacedAll], frozen=True):
    """Several requests, in order."""

    requests: tuple[PlaceVariable, ...]


class Unplace(Request[Ok], frozen=True):
    """The state of this name no longer exists on its task: free the name."""

    name: str
