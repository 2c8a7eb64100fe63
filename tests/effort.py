"""The amount of work of the tests: the number of random cases, and XLA's effort for programs that run once.

Each test declares its number of cases in `make test`, and one factor multiplies all of them.

`DFLOW_TEST_EFFORT` is the factor, a positive number such as `5` or `1/3`; 1 without it. `make nightly` uses a larger
one, and CI smaller ones. The random cases of its second Python are a part of the first one's. Tests that are marked
`once` run on one of the two. `make nightly` alone runs the tests marked `long`.

`DFLOW_TEST_HALF` is 0 or 1: a half of the tests of each file, in some folders of the cases of each parametrised test.
One Python of CI has one half, and the other Python the other; the commit decides which, so a few commits together have
all cases on both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import version

VARIABLE, HALF_VARIABLE = "DFLOW_TEST_EFFORT", "DFLOW_TEST_HALF"
#: Least factor of a run that has all tests on one Python, and of one that has those marked `once`.
FOR_ALL, FOR_ONCE = Fraction(1, 2), Fraction(1, 6)
#: Number of Hypothesis cases of a test that declares none.
DEFAULT_EXAMPLES = 100


def factor() -> Fraction:
    """Return the factor. Raises ValueError when the environment has another value than a positive number."""
    given = os.environ.get(VARIABLE, "1")
    try:
        found = Fraction(given)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if found <= 0:
        raise ValueError(f"{VARIABLE} is {given!r}, not a positive number")
    return found


def examples(count: int) -> int:
    """Number of cases of a test that declares `count` for `make test`."""
    return math.ceil(count * factor())


def outside_the_half(groups: Mapping[str, str]) -> set[str]:
    """Return the test ids outside the half of this run, one half of each group; none when the environment has no half.

    `groups`  the group of each test id, such as its test without the case; a group of one is in each run
    """
    half = os.environ.get(HALF_VARIABLE, "")
    if not half:
        return set()
    if half not in ("0", "1"):
        raise ValueError(f"{HALF_VARIABLE}: expected 0 or 1, got {half!r}")
    members: dict[str, list[str]] = {}
    for case, group in groups.items():
        members.setdefault(group, []).append(case)
    return {case for cases in members.values() if len(cases) > 1 for case in cases[1 - int(half) :: 2]}


def quick_compilation() -> str:
    """Flags with which XLA compiles a small program in a third to two thirds of the time, to slower code."""
    flags = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):  # XLA ends the process at a flag that it does not know
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
