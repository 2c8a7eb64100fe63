"""A subcommand of the command line: what it is called, what it says of itself, what it takes and what it does.

Invariant: to make the parser imports nothing but options; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand.

    `text`         what it does, as the list of all commands has it
    `more`         what its own help says behind that
    `add_options`  adds what it takes
    `run`          does it, and returns the exit status; None where `add_options` adds commands of its own
    """

    name: str
    text: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None
    more: str = "."
    epilog: str | None = None


def add_commands(parser: argparse.ArgumentParser, dest: str, commands: Iterable[Command]) -> None:
    """Have the parser take one of the commands; its name is in `dest`, and what does it in `run`."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar=dest)
    for command in commands:
        description = f"{command.text[0].upper()}{command.text[1:]}{command.more}"
        own = parsers.add_parser(command.name, help=command.text, description=description, epilog=command.epilog)
        command.add_options(own)
        if command.run is not None:
            own.set_defaults(run=command.run)
