"""What the workers of a schedule do, each in a process of its own: the programs there are, and what each is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dflow.distributed.simulation.script import Script

#: Steps over all tasks, claimed from the coordinator; synchronous training by rounds; a queue, and variables, that all
#: share.
STEPS, ROUNDS, QUEUE, VARIABLES = PROGRAMS = ("steps", "rounds", "queue", "variables")


class Program(Protocol):
    """What one worker does. `is_complete` says that nothing is left to be done."""

    is_complete: bool

    def script(self) -> Script:
        """Do it."""
        ...
