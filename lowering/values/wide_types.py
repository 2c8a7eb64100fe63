"""Types of 64 bits in a process that runs other processes' programs, whose settings of JAX it does not know.

JAX cuts values to 32 bits unless `jax_enable_x64` is set, for the whole process. A task server sets it when the first
program, variable or resource with 64 bits comes. All other settings of JAX that change numbers, such as the precision
of products or how random bits are drawn, are parts of the programs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOGGER = logging.getLogger("dflow")
_follows: list[bool] = []
#: What to do in a process that does not follow.
REMEDY = "set JAX_ENABLE_X64=1 in the environment of all processes"


@contextmanager
def following_programs() -> Iterator[None]:
    """Have this process keep 64 bits as soon as a program, a variable or a resource has them; until the block ends."""
    _follows.append(True)
    try:
        yield
    finally:
        _follows.pop()


def is_cut(dtype: Any) -> bool:
    """Whether this process would cut values of a dtype to 32 bits."""
    if jax.config.read("jax_enable_x64") or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(jax.dtypes.canonicalize_dtype(np.dtype(dtype)) != np.dtype(dtype))


def admit(dtypes: Iterable[Any]) -> None:
    """Note the dtypes of something that this process is to keep or run."""
    if _follows and any(map(is_cut, dtypes)):
        LOGGER.info("values have 64 bits from here on, as those of a worker")
        jax.config.update("jax_enable_x64", True)
