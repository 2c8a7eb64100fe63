"""Ends of a run that count as failures unless the user accepts them, by DFLOW_ACCEPT or `dflow launch --accept`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError

#: The batches of a run have ended before its steps were done.
SHORT = "short"
#: A loss was NaN or infinite.
NOT_FINITE = "not-finite"


def accepted(text: str) -> frozenset[str]:
    """Return the faults in a text with commas. Raises ConfigError for others."""
    found = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(found - {SHORT, NOT_FINITE}):
        raise ConfigError(f"DFLOW_ACCEPT: expected {SHORT} or {NOT_FINITE}, got {', '.join(unknown)}")
    return found


def is_accepted(fault: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment accepts a fault."""
    return fault in accepted(read("DFLOW_ACCEPT", environment))
