"""`dflow simulate` in words: one schedule with its log, or many."""

from __future__ import annotations

from collections.abc import Callable

from dflow.distributed.simulation.faults import parse_faults
from dflow.distributed.simulation.world import Schedule, simulate


def show_schedules(
    first_seed: int,
    count: int,
    workers: int,
    ps: int,
    steps: int,
    faults: str | None,
    is_logged: bool,
    say: Callable[[str], None] = print,
) -> int:
    """Run the schedules of `count` seeds and say how each that broke an invariant ended; the exit status.

    faults     as text, see `simulation.faults`; None draws them from each seed
    is_logged  say whatever happens in them, line by line
    raises     ValueError when `faults` cannot be read
    """
    given = None if faults is None else parse_faults(faults)
    broken = again = events = 0
    for seed in range(first_seed, first_seed + count):
        schedule = Schedule(seed, workers, ps, steps, given)
        if is_logged:
            say(f"seed {seed}, faults: {str(schedule.script) or 'none'}")
        ended = simulate(schedule, say if is_logged else None)
        broken, again, events = broken + bool(ended.broken), again + len(ended.repeated), events + ended.events
        if ended.broken or count == 1:
            say(str(ended))
            for repeated in ended.repeated:
                say(f"  step {repeated.step} was applied again: {'; '.join(map(str, repeated.reasons))}")
    if count > 1:
        say(f"{count} schedules of {steps} steps, {events} events: {broken} broke an invariant;")
        say(f"{again} of their steps were applied again after a failure that left it open whether they were")
    return int(bool(broken))
