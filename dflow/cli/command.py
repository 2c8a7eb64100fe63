"""Subcommands of the command line: name, help, options and action.

Invariant: building the parser imports only the options; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand.

    `text`         its description in the list of commands
    `more`         continuation of the description in its own help
    `add_options`  adds its options to a parser
    `run`          performs it and returns the exit status; None if `add_options` adds further subcommands
    """

    name: str
    text: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None
    more: str = "."
    epilog: str | None = None


def add_commands(parser: argparse.ArgumentParser, dest: str, commands: Iterable[Command]) -> None:
    """Add the commands to the parser. Parsing sets `dest` to the command's name, and `run` to its action."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar=dest)
    for command in commands:
        description = f"{command.text[0].upper()}{command.text[1:]}{command.more}"
        own = parsers.add_parser(command.name, help=command.text, description=description, epilog=command.epilog)
        command.add_options(own)
        if command.run is not None:
            own.set_defaults(run=command.run)
