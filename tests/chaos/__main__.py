"""`make chaos`: random faults of the processes of real clusters, on which programs train.

Each round launches two parameter tasks, some workers and a coordinator, with restarts of all of them, and snapshots.
Processes are killed, terminated and paused, their connections to the coordinator are cut or hold all bytes back, all of
their connections break, and their writes to files fail, by a schedule that the round's seed determines; the times
differ from run to run. A round fails when it does not end, or an invariant does not hold (`checks.py`, `programs/`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.faulty_run import describe, run_round
from tests.chaos.programs import PROGRAMS
from tests.chaos.schedule import drawn_schedule
from tests.nightly import rounds

#: Limit of a round, in s.
LIMIT_S = 300.0


def one_round(seed: int, limit_s: float = LIMIT_S) -> int:
    """Run the round of this seed; return 1 when it failed, after printing why."""
    schedule = drawn_schedule(seed, {name: program.hazards for name, program in PROGRAMS.items()})
    program, began_s = PROGRAMS[schedule.program], time.monotonic()
    print(f"== seed {seed}: {schedule.program}, {schedule.workers} workers, {len(schedule.faults)} faults", flush=True)
    for fault in schedule.faults:
        print(f"   {fault}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"dflow-chaos-{seed}-"))
    outcome = run_round(schedule, program, program.steps, folder, limit_s)
    took_s = time.monotonic() - began_s
    if outcome.violations:
        print(f"FAILED after {took_s:.0f} s\n{describe(schedule, outcome, folder / 'output.log')}", flush=True)
        print(f"to run it again: python -m tests.chaos --minutes 0 --seed {seed}", flush=True)
        return 1
    print(f"   good after {took_s:.0f} s, {len(outcome.faults)} faults, {outcome.results}", flush=True)
    shutil.rmtree(folder)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run rounds and print the seeds; return 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, 10 unless given; 0 for one round")
    parser.add_argument("--seed", type=int, help="of the first round; a random one unless given")
    given = parser.parse_args(words)
    first = secrets.randbelow(2**32) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory(prefix="dflow-chaos-compiled-") as compiled:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", compiled)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        statuses = rounds(first, given.minutes * 60, one_round, time.monotonic)
    failed = [seed for seed, status in statuses.items() if status]
    print(f"{len(statuses)} rounds, from seed {first} to {max(statuses)}: {len(failed)} failed")
    for seed in failed:
        print(f"  to run it again: python -m tests.chaos --minutes 0 --seed {seed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
