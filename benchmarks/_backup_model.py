"""An explicit model of synchronous steps with backup workers, fitted to section 6.3 of the OSDI 2016 paper.

    step(n, b) = the median of the n-th shortest of n + b computing times + (n + b) * cost

A worker's computing time is log-normal, and a fraction of the steps is slower by a factor. `cost` is what each worker
adds to the step of all, by its load of the ps tasks, whether its gradient is used or not. Not modelled: a late worker
begins its next step late, and transfers that overlap with other workers' computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.special import betaincinv

#: The best speedup for each worker used, 9.5%, is that of 3 backup workers: without them the step is longer by this
#: factor.
RATIO_3 = 1.095 * 53 / 50
#: Step in s of 50 workers with 4 more, the shortest; and of 200 workers, from 2,300 images/s in batches of 32.
STEP_4, STEP_200 = 1.93, 200 * 32 / 2300
#: Step in s of 50 workers without backups, by the figures above between 2.24 and 2.28.
STEP_0 = 2.26
_NORMAL = NormalDist()


@dataclass(frozen=True)
class BackupModel:
    """A cluster whose workers compute alike.

    `median_s`       median of the computing times that are not slow
    `spread`         sigma of the log-normal factor of each computing time
    `cost_s`         time that each worker adds to the step of all
    `slow_fraction`  fraction of the computing times that are slow
    `slower`         extra time of these, as a fraction
    """

    median_s: float
    spread: float
    cost_s: float
    slow_fraction: float = 0.0
    slower: float = 0.0

    def step_s(self, workers: int, backups: int = 0) -> float:
        """Return the median time of a step that ends with the first `workers` of all gradients, in s."""
        # The n-th shortest of all has this median on the scale of probabilities.
        part = float(betaincinv(workers, backups + 1, 0.5))
        return self.median_s * self._quantile(part) + self.cost_s * (workers + backups)

    def _quantile(self, part: float) -> float:
        """Return the computing time that this part of all does not exceed, in medians."""

        def excess(log_time: float) -> float:
            usual = _NORMAL.cdf(log_time / self.spread)
            slow = _NORMAL.cdf((log_time - math.log1p(self.slower)) / self.spread)
            return usual + self.slow_fraction * (slow - usual) - part

        return math.exp(float(brentq(excess, -10 * self.spread, 10 * self.spread + math.log1p(self.slower))))


def log_normal() -> BackupModel:
    """Return the model without slow steps, fitted to three figures by as many parameters."""
    return _fitted(lambda values: BackupModel(*values), (1.4, 0.2, 0.001), ())


def stragglers(spread: float = 0.005) -> BackupModel:
    """Return the model with slow steps and an assumed spread, fitted to four figures by as many parameters."""

    def made(values: tuple[float, ...]) -> BackupModel:
        median_s, cost_s, slow_fraction, slower = values
        return BackupModel(median_s, spread, cost_s, slow_fraction, slower)

    return _fitted(made, (1.7, 0.003, 0.06, 0.2), ((0, STEP_0),))


def _fitted(
    made: Callable[[tuple[float, ...]], BackupModel], first: tuple[float, ...], more: tuple[tuple[int, float], ...]
) -> BackupModel:
    """Return the model of the positive values, `first` at the beginning, that fits the paper's figures and `more`."""

    def of(logs: np.ndarray) -> BackupModel:
        return made(tuple(map(math.exp, logs)))

    def errors(logs: np.ndarray) -> list[float]:
        model = of(logs)
        steps = [(model.step_s(50, backups), paper_s) for backups, paper_s in ((4, STEP_4), *more)]
        found = [model.step_s(50) / model.step_s(50, 3) / RATIO_3, model.step_s(200) / STEP_200]
        return [one - 1 for one in (*found, *(step_s / paper_s for step_s, paper_s in steps))]

    return of(least_squares(errors, np.log(first), xtol=1e-12, ftol=1e-12, gtol=1e-12).x)
