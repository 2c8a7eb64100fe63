"""The commands that wait until the records behind them are written, while the coordinator's disk takes no writes.

Why: a record is lost if the coordinator's process ends before the record is written, and tasks may know of it by then.
A record of finished steps may be lost: the steps are claimed again, and tasks apply none twice. A record of the task of
a variable, a member, an election or a number may not be lost, since the coordinator's next process would decide
otherwise. Invariant: while such a record is not written, tasks get no message, as if the coordinator were away; later
they get all messages, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, SendReply
from dflow.distributed.coordinator.durable_records import SHELL
from dflow.distributed.coordinator.state_marks import REVISION
from dflow.distributed.wire.messages.message import Message


def waits(
    command: Command, unwritten: Collection[str], may_be_lost: tuple[str, ...], tells: Mapping[type[Message], str]
) -> bool:
    """Whether a command waits until the records of the keys `unwritten` are written; see `CoordinatorPart`."""
    if not isinstance(command, Broadcast | SendReply):
        return False
    if tells.get(type(command.message)) in unwritten:
        return True
    return any(not key.startswith((*may_be_lost, SHELL, REVISION)) for key in unwritten)
