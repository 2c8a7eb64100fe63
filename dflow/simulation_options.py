"""What `dflow simulate` takes on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dflow.option_types import at_least_one, count


def add_simulate(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[[argparse.Namespace], int]
) -> None:
    """Add the subcommand, which calls `run` with what it was given."""
    text = "run a cluster on a manual clock and a network on which things go wrong"
    parser = commands.add_parser(
        "simulate",
        help=text,
        description=f"{text.capitalize()}, and check after each event what must hold. The same options give the same "
        "events.",
        epilog="Exit status: 0 when all that must hold held, else 1.",
    )
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="of the first schedule (default: 0)")
    parser.add_argument("--schedules", type=at_least_one, default=1, metavar="N", help="how many seeds (default: 1)")
    parser.add_argument("--workers", type=at_least_one, default=3, metavar="N", help="workers (default: 3)")
    parser.add_argument("--ps", type=at_least_one, default=2, metavar="N", help="ps tasks (default: 2)")
    parser.add_argument("--steps", type=at_least_one, default=9, metavar="N", help="steps in all (default: 9)")
    parser.add_argument(
        "--faults",
        metavar="TEXT",
        help="what goes wrong, such as loss=0.1,kill=worker:0@3.5+2,cut=worker:0/coordinator@2+6; '' for nothing "
        "(default: drawn from the seed)",
    )
    parser.add_argument("--log", action="store_true", help="say whatever happens, line by line")
    parser.set_defaults(run=run)
