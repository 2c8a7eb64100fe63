"""Decisions of a trainer that all workers follow: whether the run ends, and the results of an evaluation.

Workers see different results: each worker has the metrics of the steps that it did, and perhaps its own statistics.
If each worker decided by these, one would end while the others wait for it. So all workers take one decision at each
of several points of the run, such as an evaluation:

- if the workers' loops end together, all workers exchange their reasons or results at the point, and the first counts;
- else workers come to a point at different times: the first worker there decides, and a reason that a later worker has
  counts at the next point.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.collectives import Collectives
from dflow.tracing.errors import DeadlineExceeded

#: Longest wait for a reason that may be known; the next look comes soon, in s.
KNOWN_S = 1.0


class SharedDecisions:
    """The decisions of one run of a trainer.

    is_together  whether the workers' loops end together, after the same step
    """

    def __init__(self, cluster: Cluster, run: str, *, is_together: bool) -> None:
        self._cluster, self._run = cluster, run
        self._group = cluster.part(Collectives).group if is_together else None

    def reason(self, point: str, mine: str) -> str:
        """Return why the run ends at this point; empty if it goes on. `mine` is this worker's reason."""
        what = self._what(point)
        if self._cluster.is_standalone:
            return mine
        if self._group is not None:
            return next(filter(None, self._group.exchange(what, mine)), "")
        return self._cluster.decide(what, mine) or ""

    def known_reason(self, point: str) -> str:
        """Return why the run will end at a point that this worker has not come to; empty if none is known.

        None is known while the coordinator is away.
        """
        if self._cluster.is_standalone or self._group is not None:
            return ""
        try:
            return self._cluster.decide(self._what(point), None, KNOWN_S) or ""
        except DeadlineExceeded:
            return ""

    def results(self, point: str, mine: Mapping[str, float]) -> dict[str, float]:
        """Return the results that all workers use at this point; `mine` are this worker's."""
        if self._cluster.is_standalone:
            return dict(mine)
        what, word = self._what(point), json.dumps(dict(mine))
        decided = self._group.exchange(what, word)[0] if self._group is not None else self._cluster.decide(what, word)
        found: dict[str, float] = json.loads(decided or word)
        return found

    def _what(self, point: str) -> str:
        return f"{self._run}: {point}"
