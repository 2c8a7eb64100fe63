"""What worker 0, the chief, decides at points of a training, and the other workers wait for.

Why one worker: callbacks of Keras write files and keep state, so each of them runs in one process, as under
TensorFlow's strategies.
"""

from __future__ import annotations

import json
import time
from typing import Any

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.collectives import Collectives
from dflow.tracing.devices.task_name import split_task_name, task_name
from dflow.tracing.errors import DeadlineExceeded, TaskLost

#: Time between two looks for the chief's word, in s.
_LOOK_S = 0.02


class ChiefWords:
    """The words of one training, each a value of JSON.

    run          name of the training, the same on all workers
    is_together  whether the workers' loops end together, so that all come to each point at one time
    """

    def __init__(self, cluster: Cluster, run: str, *, is_together: bool) -> None:
        self._cluster, self._run = cluster, run
        self._group = cluster.part(Collectives).group if is_together else None
        job, index = split_task_name(cluster.task)
        self._chief = task_name(job, 0)
        #: Whether this worker is the chief.
        self.is_chief = cluster.is_standalone or index == 0

    def known(self, point: str) -> Any:
        """Return the word of this point if an earlier process of the chief has given it; else None."""
        if self._cluster.is_standalone or self._group is not None:
            return None
        found = self._cluster.decide(self._what(point), None)
        return None if found is None else json.loads(found)

    def tell(self, point: str, word: Any) -> None:
        """Give the word of this point, as the chief."""
        if self._group is not None:
            self._group.exchange(self._what(point), json.dumps(word))
        elif not self._cluster.is_standalone:
            self._cluster.decide(self._what(point), json.dumps(word))

    def hear(self, point: str) -> Any:
        """Wait for the chief's word at this point, and return it.

        Raises DeadlineExceeded after the timeout of steps, and TaskLost if the chief has left and is not expected back.
        """
        if self._group is not None:
            return json.loads(self._group.exchange(self._what(point))[self._group.members.index(self._chief)])
        until = time.monotonic() + self._cluster.settings.step_timeout_s
        while (word := self.known(point)) is None:
            if self._chief not in self._cluster.colleagues()[0]:
                raise TaskLost(
                    f"{self._what(point)}: expected the word of {self._chief}, which has left",
                    "launch with --restart on-failure, which starts it again",
                )
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"{self._what(point)}: expected the word of {self._chief}, waited "
                    f"{self._cluster.settings.step_timeout_s:g} s for its callbacks",
                    "see its output, and give fit the same arguments on all workers",
                )
            time.sleep(_LOOK_S)
        return word

    def first(self, what: str, mine: str) -> str:
        """Return the text of the first worker that gives one for `what`; with a group, that of the chief."""
        if self._cluster.is_standalone:
            return mine
        if self._group is not None:
            return self._group.exchange(self._what(what), mine)[self._group.members.index(self._chief)]
        return self._cluster.decide(self._what(what), mine) or mine

    def _what(self, point: str) -> str:
        return f"{self._run}: {point}"
