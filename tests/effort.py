"""How many random cases the tests try: each says how many in `make test`, and one factor multiplies them all.

`DFLOW_TEST_EFFORT` is the factor, a positive whole number; 1 without it. `make nightly` runs with a larger one.
"""

from __future__ import annotations

import os

VARIABLE = "DFLOW_TEST_EFFORT"
#: What Hypothesis tries where a test does not say.
DEFAULT_EXAMPLES = 100


def factor() -> int:
    """The factor. Raises ValueError when the environment has no positive whole number for it."""
    given = os.environ.get(VARIABLE, "1")
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise ValueError(f"{VARIABLE} is {given!r}, not a positive whole number")
    return int(given)


def examples(count: int) -> int:
    """How many cases a test tries that tries `count` in `make test`."""
    return count * factor()
