"""What happened on a task, as it is recorded and sent to tools, which read it without JAX."""

from __future__ import annotations

from typing import Final

import msgspec

# A step, at the task that started it; and the partition of a step that a task runs.
STEP_BEGAN: Final = "step began"
STEP_ENDED: Final = "step ended"
PART_BEGAN: Final = "part began"
PART_ENDED: Final = "part ended"
# An item of a plan. It may wait for a value, a queue, a branch or a loop.
ITEM_BEGAN: Final = "item began"
ITEM_ENDED: Final = "item ended"
ITEM_FAILED: Final = "item failed"
# The results of an XLA call are computed; recorded between `watch` and `unwatch`.
COMPUTED: Final = "computed"
# The values of an edge in one message, with the other task and the size.
SENT: Final = "sent"
RECEIVED: Final = "received"
WAIT_EXPIRED: Final = "wait expired"
# Connections and the roster.
CONNECTED: Final = "connected"
CONNECTION_LOST: Final = "connection lost"
ROSTER_CHANGED: Final = "roster changed"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event on a task.

    `at_ns`       the time, by the task's monotonic clock
    `what`        one of the constants above
    `origin`      the task that started the step, and `step` its number; empty for an event outside of steps
    `kind`        class of the item, such as Call
    `name`        the item's node, or the edge of a send, a receive or a value
    `line`        the user's line of the item
    `peer`        the other task
    `size_bytes`  size of the message with the values of an edge
    `values`      number of values that a Send or a Recv item transfers in one message, else 0
    `began_ns`    when the transfer or wait that ended at `at_ns` began, if no event records that, else 0
    `number`      index of the item in its plan; an item of a loop's body runs once per iteration
    `text`        anything else, such as an error
    """

    at_ns: int
    what: str
    origin: str = ""
    step: int = 0
    kind: str = ""
    name: str = ""
    line: str = ""
    peer: str = ""
    size_bytes: int = 0
    values: int = 0
    began_ns: int = 0
    number: int = 0
    text: str = ""
