"""Output of `dflow simulate`: one schedule with its log, or many; or the figures of a cluster of any size."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from dflow.distributed.simulation.at_size.coordinator_load import Load
from dflow.distributed.simulation.at_size.hardware import MB, PAPER, Computing, Hardware
from dflow.distributed.simulation.at_size.report import report
from dflow.distributed.simulation.at_size.step_times import Shape, Step
from dflow.distributed.simulation.fault_schedule import FaultSchedule, simulate
from dflow.distributed.simulation.faults import parse_faults


def show_schedules(options: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Run the schedules that `options` describe, print each that broke an invariant, and return the exit status.

    raises     ValueError when the faults cannot be parsed
    """
    faults = None if options.faults is None else parse_faults(options.faults)
    count, steps = options.schedules, options.steps or 9
    broken = again = events = 0
    for seed in range(options.seed, options.seed + count):
        schedule = FaultSchedule(seed, options.workers, options.ps, steps, faults, options.program)
        if options.log:
            say(f"seed {seed}, faults: {str(schedule.actual_faults) or 'none'}")
        ended = simulate(schedule, say if options.log else None)
        broken, again, events = broken + bool(ended.broken), again + len(ended.repeated), events + ended.events
        if ended.broken or count == 1:
            say(str(ended))
            for repeated in ended.repeated:
                say(f"  step {repeated.step} was applied again: {'; '.join(map(str, repeated.reasons))}")
    if count > 1:
        say(f"{count} schedules of {steps} steps, {events} events: {broken} broke an invariant;")
        say(f"{again} of their steps were applied again after a failure that left it open whether they were")
    return int(bool(broken))


#: Bytes sent for a scalar, and for 32 rows of 1,024 float32 with their indices.
_SCALAR_BYTES, _ROWS_BYTES = 4.0, 32 * 4100.0


def show_size(options: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Print the step times and the coordinator's load for the cluster that `options` describe; return the exit status.

    raises  ValueError when all workers are backups
    """
    shape = Shape(options.workers, options.ps, not options.asynchronous, options.backups)
    step = {
        "scalar": Step(_SCALAR_BYTES * options.ps),
        "dense": Step(options.mb * MB),
        "sparse": Step(_ROWS_BYTES, _ROWS_BYTES, is_sparse=True),
        "train": Step(options.mb * MB, options.mb * MB),
    }[options.step]
    computing = Computing(0.0)
    if options.step == "train":
        computing = Computing(options.compute_ms / 1e3, 0.05, options.slow, options.slow_by, options.hidden)
    found = report(_hardware(options), shape, step, computing, options.steps, options.seed)
    load = found.coordinator
    say(f"{options.step} step, {shape.workers} workers, {shape.ps} ps tasks")
    say(f"  step       {_ms(found.median_s)} (p10 {_ms(found.p10_s)}, p90 {_ms(found.p90_s)})")
    say(f"  workers    {found.steps_per_s:,.1f} steps/s in all")
    say(f"  each ps    {found.ps_bytes_per_s / MB:,.1f} MB/s")
    say(f"coordinator of {load.tasks} tasks, measured on this machine")
    say(f"  a second   {_load(load.steady)}")
    say(f"  a join     {_load(load.join)}")
    return 0


def _hardware(options: argparse.Namespace) -> Hardware:
    given = {
        "link_bytes_per_s": options.link_gbit and options.link_gbit * 1e9 / 8,
        "hop_s": options.hop_us and options.hop_us / 1e6,
        "message_s": options.message_us and options.message_us / 1e6,
    }
    return replace(PAPER, **{name: value for name, value in given.items() if value is not None})


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _load(load: Load) -> str:
    return f"{load.messages:,.0f} messages, {load.size_bytes / MB:,.2f} MB, {load.processor_s * 1e3:,.1f} ms of a core"
