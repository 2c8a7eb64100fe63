"""Servers that take one piece of work at a time, in the order in which it comes, many at once in one array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


def served(arrivals: Times, service_s: float) -> Times:
    """When each piece of work is done: `arrivals` is float64[servers, pieces] in s, in any order, and so is the result.

    A server begins a piece when it has come and all that came before are done.
    """
    order = np.argsort(arrivals, axis=1, kind="stable")
    waiting = np.take_along_axis(arrivals, order, axis=1)
    before = np.arange(arrivals.shape[1]) * service_s
    done = np.maximum.accumulate(waiting - before, axis=1) + before + service_s
    result = np.empty_like(arrivals)
    np.put_along_axis(result, order, done, axis=1)
    return result
