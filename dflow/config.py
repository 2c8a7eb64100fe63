"""Settings of this process, read from the environment once, at import.

All variables are declared in `tracing/environment.py`; those of clusters are read when a process joins one.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflow.lowering.passes.choose import BUDGET_S
from dflow.tracing.environment import misspelt, read
from dflow.tracing.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Settings: DFLOW_CHECK, DFLOW_DUMP and DFLOW_PLACEMENT_S."""

    check: bool = False
    dump: Path | None = None
    placement_s: float = BUDGET_S


def from_environment(environment: Mapping[str, str]) -> Config:
    """Return the settings from these variables. Raises ConfigError for an invalid value; warns of misspelt names."""
    for name, near in misspelt(environment).items():
        warnings.warn(f"{name} is set, but dflow reads no variable of that name; did you mean {near}?", stacklevel=2)
    check, dump = read("DFLOW_CHECK", environment), read("DFLOW_DUMP", environment)
    if check not in ("", "0", "1"):
        raise ConfigError(f"DFLOW_CHECK is {check!r}; the legal values are 0 and 1")
    return Config(check == "1", Path(dump) if dump else None, _seconds(read("DFLOW_PLACEMENT_S", environment)))


def _seconds(text: str) -> float:
    try:
        found = float(text or BUDGET_S)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"DFLOW_PLACEMENT_S is {text!r}; the legal values are numbers of seconds above 0")
    return found


CONFIG = from_environment(os.environ)
