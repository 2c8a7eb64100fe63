"""Subcommands of the command line, and types of their options, which parse a text or raise an error with the remedy.

Invariant: building the parser does not import JAX; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Command:
    """One subcommand.

    `text`         its description in the list of commands
    `more`         continuation of the description in its own help
    `add_options`  adds its options to a parser
    `run`          performs it and returns the exit status, or None for 0; absent if it has further subcommands
    """

    name: str
    text: str
    add_options: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int | None] | None = None
    more: str = "."
    epilog: str | None = None


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses unknown options itself, with its own usage and the name that was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse all arguments. Exits with status 2 and a message if one is unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
            self.error(f"unrecognized argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a command or value that is none of its choices, with the one that was meant; called by argparse."""
        if action.choices is None or value in action.choices:
            return
        near = difflib.get_close_matches(str(value), list(map(str, action.choices)), n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(map(str, action.choices))}"
        raise argparse.ArgumentError(action, f"invalid choice {str(value)!r}; {remedy}")


def add_commands(parser: argparse.ArgumentParser, dest: str, commands: Iterable[Command]) -> None:
    """Add the commands to the parser. Parsing sets `dest` to the command's name, and `run` to its action."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar=dest)
    for command in commands:
        description = f"{command.text[0].upper()}{command.text[1:]}{command.more}"
        own = parsers.add_parser(command.name, help=command.text, description=description, epilog=command.epilog)
        command.add_options(own)
        if command.run is not None:
            own.set_defaults(run=command.run)


def add_seconds(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    option: str,
    default: float | None,
    text: str,
    usual: str = "",
) -> None:
    """Add an option for a time in s; `usual` says what is done by default, if there is no one time."""
    help = f"{text} (default: {usual or format(default, 'g')})"
    parser.add_argument(option, type=float, default=default, metavar="SECONDS", help=help)


def add_all_tables(parser: argparse._ActionsContainer) -> None:
    text = "show every variable, every value sent, and what steps cost each task, not only the largest"
    parser.add_argument("--all-tables", action="store_true", help=text)


def count(text: str) -> int:
    """Parse an integer of at least 0."""
    number = _integer(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative; give 0 or more")
    return number


def at_least_one(text: str) -> int:
    number = _integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few; give 1 or more")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def job_count(text: str) -> tuple[str, int]:
    """Parse `JOB=N`, such as ps=2, to the job and its number of tasks."""
    job, equals, number = text.partition("=")
    if not (job and equals and number.isascii() and number.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N, such as ps=2")
    return job, int(number)


def checked(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Return `parse` for use as an option type: the message of its ValueError is shown to the user unchanged."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
