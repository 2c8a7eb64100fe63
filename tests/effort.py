"""How much work the tests are: how many random cases they try, and how well XLA compiles what they run once.

Each test says how many cases it tries in `make test`, and one factor multiplies them all.

`DFLOW_TEST_EFFORT` is the factor, a positive number such as `5` or `1/3`; 1 without it. `make nightly` runs with a
larger one, and CI with a smaller on the second Python, whose random cases are the very ones of the first.
"""

from __future__ import annotations

import math
import os
from fractions import Fraction
from importlib.metadata import version

VARIABLE = "DFLOW_TEST_EFFORT"
#: What Hypothesis tries where a test does not say.
DEFAULT_EXAMPLES = 100


def factor() -> Fraction:
    """The factor. Raises ValueError when the environment has no positive number for it."""
    given = os.environ.get(VARIABLE, "1")
    try:
        found = Fraction(given)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if found <= 0:
        raise ValueError(f"{VARIABLE} is {given!r}, not a positive number")
    return found


def examples(count: int) -> int:
    """How many cases a test tries that tries `count` in `make test`."""
    return math.ceil(count * factor())


def quick_compilation() -> str:
    """Flags of XLA with which it compiles a small program in a third to two thirds of the time, to slower code."""
    flags = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):  # XLA ends the process at a flag that it does not know
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
