"""First-in first-out queues of servers, computed for many servers in one array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


def served(arrivals: Times, service_s: float) -> Times:
    """Return the time at which each piece of work is done, in the shape and order of `arrivals`.

    arrivals   float64[servers, pieces] in s, in any order; a server takes one piece at a time, first come first served
    service_s  time for one piece
    """
    order = np.argsort(arrivals, axis=1, kind="stable")
    waiting = np.take_along_axis(arrivals, order, axis=1)
    before = np.arange(arrivals.shape[1]) * service_s
    done = np.maximum.accumulate(waiting - before, axis=1) + before + service_s
    result = np.empty_like(arrivals)
    np.put_along_axis(result, order, done, axis=1)
    return result
