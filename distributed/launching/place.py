"""The launcher's interface to a place where the processes of a cluster run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class TaskProgram:
    """The program of a task.

    `task`         its full name, or "coordinator"
    `words`        the words of the command after the Python interpreter's name
    `environment`  variables added to the environment of the place, which they override
    `defaults`     variables added to the environment of the place, which overrides them
    """

    task: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


class Running(Protocol):
    """A started program."""

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output."""
        ...

    def poll(self) -> int | None:
        """Return the exit status, negative for the signal that killed the program; None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask the program and the processes that it started to end; without effect if it has ended."""
        ...

    def kill(self) -> None:
        """End the program and the processes that it started, and wait until it is gone."""
        ...


class LaunchPlace(Protocol):
    """A place where programs are started."""

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> Running:
        """Start a program; `on_line` is called with each line of output, without its end, from any thread.

        raises  OSError when the program cannot be started
        """
        ...

    def close(self) -> None:
        """Release the resources of the place, once all started programs have ended."""
        ...
