"""`python -m tests.fuzz --frames N --seed S`: N malformed and hostile frames to a live task.

It fails when the task ends, hangs, stops serving others, or grows. The seed determines all frames: a round of `--round`
frames depends on the seed and the round's number; a failure prints both.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from dataclasses import replace

from tests.fuzz.siege import Tally, Usage, Victim, besiege

LOOPBACK = "127.0.0.1:0"
#: Growth that is allowed from the first tenth of the rounds to the end, for any number of frames. The memory is what
#: the allocator keeps of freed memory, which is constant after some hundred thousand frames.
MORE = Usage(memory_mib=48.0, threads=16, descriptors=8)
#: Additional growth for each plan, with its compiled programs, which a task keeps.
PLAN_MIB = 0.4


def main() -> int:
    """Run the siege; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--round", type=int, default=20_000, help="frames between two looks at the task")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--role", choices=("task", "coordinator"), default="task", help="who is fuzzed")
    parser.add_argument("--tcp", action="store_true", help="over TCP instead of a Unix socket")
    options = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Victim(LOOPBACK if options.tcp else f"unix:{folder}/socket", options.role) as victim,
    ):
        for number in range(max(1, options.frames // options.round)):
            try:
                besiege(victim, options.seed * 1_000_003 + number, options.round, tally)
            except BaseException as error:
                print(f"seed {options.seed}, round {number}: {error!r}; status {victim.process.poll()}\n{victim.end()}")
                return 1
            rate = tally.frames / (time.monotonic() - began)
            held = tally.usages[-1]
            print(f"{tally.frames} frames, {tally.connections} connections, {rate:.0f}/s: {held}", flush=True)
    return verdict(tally, options.seed)


def verdict(tally: Tally, seed: int) -> int:
    """Whether the task has grown."""
    first, last = tally.usages[len(tally.usages) // 10], tally.usages[-1]
    parts = ("memory_mib", "threads", "descriptors")
    more = replace(MORE, memory_mib=MORE.memory_mib + PLAN_MIB * (last.plans - first.plans))
    grown = [part for part in parts if getattr(last, part) > getattr(first, part) + getattr(more, part)]
    print(f"seed {seed}: {tally.frames} frames, {tally.sent_bytes >> 20} MiB; at first {first}; at last {last}")
    if grown:
        print(f"the task has grown: {', '.join(grown)}")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
