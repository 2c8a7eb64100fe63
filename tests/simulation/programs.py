"""The programs that the workers of a schedule may run, each worker in its own process."""

from __future__ import annotations

from typing import Protocol

#: Asynchronous steps claimed from the coordinator; synchronous training by rounds; shared variables;
#: asynchronous steps, or synchronous training, that change variables, with snapshots of them.
STEPS, ROUNDS, VARIABLES, SNAPSHOTS, ROUND_SNAPSHOTS = PROGRAMS = (
    "steps",
    "rounds",
    "variables",
    "snapshots",
    "round-snapshots",
)
#: The programs that change variables which are in snapshots.
WITH_SNAPSHOTS = (SNAPSHOTS, ROUND_SNAPSHOTS)


class WorkerProgram(Protocol):
    """The program of one worker. `is_complete` is set when it has nothing left to do."""

    is_complete: bool

    def run(self) -> None:
        """Run the program."""
        ...
