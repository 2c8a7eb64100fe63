"""`python -m tests.simulation`: run the real runtime on a simulated network with faults, and check its invariants.

The same options give the same events. Exit status: 0 when every invariant held, else 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from dflow.cli.command import at_least_one, checked, count
from tests.simulation.fault_schedule import FaultSchedule, simulate
from tests.simulation.faults import parse_faults
from tests.simulation.programs import PROGRAMS, STEPS


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser("python -m tests.simulation", description=__doc__.partition(": ")[2])
    made.add_argument("--seed", type=count, default=0, metavar="N", help="seed of the first schedule (default: 0)")
    made.add_argument("--schedules", type=at_least_one, default=1, metavar="N", help="seeds to try (default: 1)")
    made.add_argument("--workers", type=at_least_one, default=3, metavar="N", help="workers (default: 3)")
    made.add_argument("--ps", type=at_least_one, default=2, metavar="N", help="ps tasks (default: 2)")
    made.add_argument("--steps", type=at_least_one, default=9, metavar="N", help="steps (default: 9)")
    made.add_argument(
        "--program",
        choices=PROGRAMS,
        default=STEPS,
        help="the workers run steps over all tasks, train synchronously in rounds, share variables, or run "
        f"steps or rounds that change variables, with snapshots of these (default: {STEPS})",
    )
    made.add_argument(
        "--faults",
        type=checked(parse_faults),
        metavar="TEXT",
        help="faults, such as loss=0.1,kill=worker:0@3.5+2,cut=worker:0/coordinator@2+6; '' for none "
        "(default: drawn from the seed)",
    )
    made.add_argument("--log", action="store_true", help="print each event")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run the schedules, print each that broke an invariant, and return the exit status."""
    options = parser().parse_args(words)
    count, steps = options.schedules, options.steps
    broken = again = events = 0
    for seed in range(options.seed, options.seed + count):
        schedule = FaultSchedule(seed, options.workers, options.ps, steps, options.faults, options.program)
        if options.log:
            print(f"seed {seed}, faults: {str(schedule.actual_faults) or 'none'}")
        ended = simulate(schedule, print if options.log else None)
        broken, again, events = broken + bool(ended.broken), again + len(ended.repeated), events + ended.events
        if ended.broken or count == 1:
            print(ended)
            for repeated in ended.repeated:
                print(f"  step {repeated.step} was tried again: {'; '.join(map(str, repeated.reasons))}")
    if count > 1:
        print(f"{count} schedules of {steps} steps, {events} events: {broken} broke an invariant;")
        print(
            f"{again} of their steps were tried again after they had been applied by an attempt that was not reported"
        )
    return int(bool(broken))


if __name__ == "__main__":
    # The code that is simulated would handle a KeyboardInterrupt as its own error.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
