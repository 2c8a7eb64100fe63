"""Types of command-line options: functions that parse a text, or raise an error with the remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Parsed = TypeVar("Parsed")


def count(text: str) -> int:
    """Parse an integer of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative; give 0 or more")
    return number


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few; give 1 or more")
    return number


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
