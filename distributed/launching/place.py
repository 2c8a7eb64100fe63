"""Where the processes of a cluster run: what the launcher needs of such a place, and nothing about any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class TaskProgram:
    """What a task runs.

    `task`         its full name, or "coordinator"
    `words`        the words after the Python interpreter's name
    `environment`  what it gets beside the environment of the place, and over it
    `defaults`     the same, but what the place has already comes first
    """

    task: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


class Running(Protocol):
    """A program that was started."""

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output."""
        ...

    def poll(self) -> int | None:
        """None while it runs, else its exit status, negative for the signal that killed it."""
        ...

    def terminate(self) -> None:
        """Ask it and all that it started to end; without effect when it has ended."""
        ...

    def kill(self) -> None:
        """End it and all that it started, and wait until it is gone."""
        ...


class Place(Protocol):
    """Somewhere to start programs."""

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> Running:
        """Start it; `on_line` is called with each line of output, without its end, from any thread.

        raises  OSError when it cannot be started
        """
        ...

    def close(self) -> None:
        """Give back what the place holds, when all that was started has ended."""
        ...
