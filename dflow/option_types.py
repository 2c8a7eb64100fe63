"""The types of options on the command line: each reads a text, or says what is wrong with it and what is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Parsed = TypeVar("Parsed")


def count(text: str) -> int:
    """A number, 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative; give 0 or more")
    return number


def at_least_one(text: str) -> int:
    """A number, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few; give 1 or more")
    return number


def job_count(text: str) -> tuple[str, int]:
    """A job and how many tasks it has, such as ps=2."""
    job, equals, number = text.partition("=")
    if not (job and equals and number.isascii() and number.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N, such as ps=2")
    return job, int(number)


def checked(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """The same, whose ValueError is told to the user of the command line as it is."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
