"""The command line of `dflow simulate`."""

from __future__ import annotations

import argparse
import signal

from dflow.cli.command import Command
from dflow.cli.option_types import at_least_one, count
from dflow.distributed.simulation.programs import PROGRAMS, STEPS


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="seed of the first schedule (default: 0)")
    parser.add_argument("--workers", type=at_least_one, default=3, metavar="N", help="workers (default: 3)")
    parser.add_argument("--ps", type=at_least_one, default=2, metavar="N", help="ps tasks (default: 2)")
    parser.add_argument(
        "--steps",
        type=at_least_one,
        metavar="N",
        help="number of steps (default: 9; with --step, enough for stable figures)",
    )
    _add_schedules(parser.add_argument_group("faults"))
    _add_size(parser.add_argument_group("size"))


def _run_simulation(options: argparse.Namespace) -> int:
    from dflow.cli.simulation_view import show_schedules, show_size

    # The code that is simulated would handle a KeyboardInterrupt as its own error.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return show_schedules(options) if options.step is None else show_size(options)
    finally:
        signal.signal(signal.SIGINT, handler)


def _add_schedules(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--schedules", type=at_least_one, default=1, metavar="N", help="number of seeds to try (default: 1)"
    )
    group.add_argument(
        "--program",
        choices=PROGRAMS,
        default=STEPS,
        help="the workers run steps over all tasks, train synchronously in rounds, or share a queue or variables "
        f"(default: {STEPS})",
    )
    group.add_argument(
        "--faults",
        metavar="TEXT",
        help="faults, such as loss=0.1,kill=worker:0@3.5+2,cut=worker:0/coordinator@2+6; '' for none "
        "(default: drawn from the seed)",
    )
    group.add_argument("--log", action="store_true", help="print each event")


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--step",
        choices=("scalar", "dense", "sparse", "train"),
        help="fetch a number from each ps, the whole model, 32 rows of a table; or fetch the model, compute and send "
        "as large an update",
    )
    group.add_argument("--mb", type=_positive, default=100.0, metavar="MB", help="size of the model (default: 100)")
    group.add_argument("--asynchronous", action="store_true", help="no worker waits for another")
    group.add_argument("--backups", type=count, default=0, metavar="B", help="workers not waited for (default: 0)")
    group.add_argument(
        "--link-gbit", type=_positive, metavar="X", help="bandwidth of each task's network card (default: 8.3)"
    )
    group.add_argument("--hop-us", type=_positive, metavar="X", help="latency from task to task (default: 202)")
    group.add_argument(
        "--message-us", type=_positive, metavar="X", help="processor time of a ps task for each message (default: 43)"
    )
    group.add_argument(
        "--compute-ms",
        type=_positive,
        default=1000.0,
        metavar="X",
        help="computing time of a step, with train (default: 1000)",
    )
    group.add_argument(
        "--slow", type=_part, default=0.0, metavar="X", help="fraction of steps that are slow (default: 0)"
    )
    group.add_argument(
        "--hidden",
        type=_part,
        default=0.0,
        metavar="X",
        help="fraction of transfer time that overlaps with computing (default: 0)",
    )
    group.add_argument(
        "--slow-by",
        type=_positive,
        default=0.3,
        metavar="X",
        help="mean extra time of a slow step, as a fraction of its time (default: 0.3)",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and less than 1")
    return value


SIMULATE = Command(
    "simulate",
    "simulate a cluster with faults, or estimate the step times of one of any size",
    _simulate_options,
    _run_simulation,
    more=". Without --step, the runtime runs on a simulated network with faults, and its invariants are checked after "
    "each event. With --step, a model estimates the step times and the coordinator's load. The same options give the "
    "same events.",
    epilog="Exit status: 0 when every invariant held, else 1.",
)
