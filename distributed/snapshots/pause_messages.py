"""Messages for a pause of the steps of several tasks; during the pause, a task has all tasks capture their state."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Message, Notice, Request


class StepsPaused(Message, frozen=True):
    """No shared step runs on any task, and none begins until the pause `number` ends."""

    number: int


class PauseSteps(Request[StepsPaused], frozen=True):
    """Pause the shared steps of all tasks; answered by `StepsPaused`. The pauses of several tasks follow each other.

    A step that a dead worker has left, perhaps applied on some tasks only, is done by another worker first.
    """

    speaker = "task"

    task: str


class StepsResumed(Message, frozen=True):
    """Whether the pause was reached and kept until now: no task joined in it."""

    were_paused: bool


class ResumeSteps(Request[StepsResumed], frozen=True):
    """End the task's pause, or withdraw its request for one; `number` is that of the pause, 0 if none was reached."""

    speaker = "task"

    task: str
    number: int


class HoldSteps(Notice, frozen=True):
    """To a task: begin no shared step in the pause `number`, and report by `StepsHeld` when none runs; 0: it is over.

    In a pause for a return to a snapshot, the task also ends its parts of steps that wait for a queue.
    """

    number: int
    is_for_return: bool = False


class StepsHeld(Notice, frozen=True):
    """The task runs no shared step in the pause `number`."""

    speaker = "task"

    task: str
    number: int
