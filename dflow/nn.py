"""`jax.nn`, with variables accepted wherever it takes arrays."""

from __future__ import annotations

import sys
from typing import Any

import jax.nn

from dflow.functional import fill


def __getattr__(name: str) -> Any: ...  # for the type checker; `fill` puts the working one here


fill(sys.modules[__name__], jax.nn)
