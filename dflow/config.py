"""Settings read from the environment once, at import: type, default and meaning.

Lower layers never read these variables; their settings are passed to them. The settings of clusters are read in
`cluster`, `cluster_options` and `distributed`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflow.lowering.passes.choose import BUDGET_S
from dflow.tracing.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """The settings of this process."""

    #: DFLOW_CHECK=1 verifies each graph before and after each pass.
    check: bool = False
    #: DFLOW_DUMP=dir writes each graph, before and after each pass, into a folder per traced function.
    dump: Path | None = None
    #: DFLOW_PLACEMENT_S limits, in s, the pricing and search for a function whose devices are chosen.
    placement_s: float = BUDGET_S


def _parse(name: str, text: str) -> Any:
    if name == "dump":
        return Path(text)
    if name == "placement_s":
        return _seconds(text)
    if text not in ("0", "1"):
        raise ConfigError(f"DFLOW_{name.upper()} is {text!r}; the legal values are 0 and 1")
    return text == "1"


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"DFLOW_PLACEMENT_S is {text!r}; the legal values are numbers of seconds above 0")
    return found


def from_environment(environment: dict[str, str]) -> Config:
    """Return the settings from these environment variables. Raises ConfigError for an invalid value."""
    given = {f.name: environment.get(f"DFLOW_{f.name.upper()}") for f in fields(Config)}
    return Config(**{name: _parse(name, text) for name, text in given.items() if text})


CONFIG = from_environment(dict(os.environ))
