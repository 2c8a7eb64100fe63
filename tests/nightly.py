"""`make nightly`: run the tests marked `long`, and repeat the random tests for some minutes, each round with new cases.

A run with `--seed`, which repeats a round, leaves out the former. A round runs every random test with `--effort` times
the cases of `make test`, drawn from the next seed. A round begins only if it would end in time when it takes as long
as the longest round; the first one always runs. Options after `--` are pytest's, such as `-- -n 2` or `--
tests/lowering -x`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count

from tests.effort import VARIABLE

#: Time limit of a test for each multiple of its cases in `make test`, in s, unless it sets one itself.
TIMEOUT_S = 120


def command(effort: int, seed: int, more: Sequence[str]) -> list[str]:
    """Return the command of one round."""
    options = ["-m", "hypothesis", "--hypothesis-profile", "nightly", "--hypothesis-seed", str(seed)]
    return [sys.executable, "-m", "pytest", "-q", *options, "--timeout", str(TIMEOUT_S * effort), *more]


def run(effort: int, seed: int, more: Sequence[str]) -> int:
    """Run one round; return pytest's exit status."""
    environment = {"XLA_FLAGS": "", **os.environ, VARIABLE: str(effort)}
    return subprocess.run(command(effort, seed, more), env=environment, check=False).returncode


def run_long(more: Sequence[str]) -> int:
    """Run the tests marked `long`; return pytest's exit status."""
    print("== the tests marked `long`", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "long", *more], check=False).returncode


def rounds(first: int, seconds: float, run: Callable[[int], int], clock: Callable[[], float]) -> dict[int, int]:
    """Run rounds from the seed `first` on; return their exit statuses by seed."""
    began, longest, statuses = clock(), 0.0, dict[int, int]()
    for seed in count(first):
        if statuses and clock() - began + longest > seconds:
            break
        before = clock()
        statuses[seed] = run(seed)
        longest = max(longest, clock() - before)
    return statuses


def main(words: Sequence[str] | None = None) -> int:
    """Run rounds and print the seeds; return 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, 60 unless said")
    parser.add_argument("--effort", type=int, default=5, help="times the cases of `make test`, 5 unless said")
    parser.add_argument("--seed", type=int, help="of the first round; a random one unless said")
    parser.add_argument("more", nargs="*", metavar="OPTION", help="an option of pytest's, after --")
    given = parser.parse_args(words)
    if given.effort < 1:
        parser.error(f"--effort is {given.effort}, not a positive whole number")
    first = secrets.randbelow(2**32) if given.seed is None else given.seed
    long_status = run_long(given.more) if given.seed is None else 0

    def one(seed: int) -> int:
        print(f"== seed {seed}, {given.effort} times the cases", flush=True)
        return run(given.effort, seed, given.more)

    statuses = rounds(first, given.minutes * 60, one, time.monotonic)
    failed = [seed for seed, status in statuses.items() if status]
    print(f"{len(statuses)} rounds, from seed {first} to {max(statuses)}: {len(failed)} failed")
    for seed in failed:
        print(f"  to run it again: make nightly MINUTES=0 EFFORT={given.effort} SEED={seed}")
    return int(bool(failed or long_status))


if __name__ == "__main__":
    sys.exit(main())
