"""Description of a worker's step, for the coordinator to compare: the variables written and the optimizers' settings.

Constants of a step, such as keys for noise, may differ between workers that train asynchronously or average their
gradients. The variables that they train, and the rules of the updates, may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps.steps_ahead import RegisteredStep
from dflow.distributed.training.applying import GivenOptimizer, applied_to
from dflow.distributed.training.work_messages import CompareStep, RunRefused
from dflow.tracing.errors import StrategyError
from dflow.tracing.syntax.listing import ListedItem

#: Longest wait for the coordinator, which may be started again meanwhile, in s.
COMPARE_S = 600.0


class ComparedSteps:
    """The steps of a worker's runs, which the coordinator compares with those of the other workers."""

    def __init__(self, cluster: Cluster) -> None:
        self._coordinator = cluster.coordinator
        #: By run, the difference between its workers.
        self._refusals: dict[str, str] = {}
        cluster.coordinator.session.call_on(RunRefused, lambda told: self._refusals.update({told.run: told.text}))

    def refuse_unequal(self, run: str) -> None:
        """Raise StrategyError if the workers of the run are known to have different steps."""
        if text := self._refusals.get(run):
            raise StrategyError(text)

    def compare(self, run: str, key: str, written: Iterable[Any], optimizers: Sequence[GivenOptimizer]) -> None:
        """Have the coordinator compare a step with those of the run's workers; raise StrategyError if it differs.

        key         steps of one key are compared
        written     variables that the step writes: their names and types are compared
        optimizers  optimizers that update them: their settings are compared
        """
        names = sorted({f"variable {one.name!r} {one.type}" for one in written})
        items = (*names, *(f"{item.kind} {item.text}" for item in settings_of(optimizers)))
        digest = hashlib.sha256(json.dumps(items).encode()).hexdigest()
        message = CompareStep(run, self._coordinator.task, key, digest)
        if not self._coordinator.ask(message, COMPARE_S).is_known:
            self._coordinator.ask(replace(message, items=items or ("no variable",)), COMPARE_S)

    def compare_call(self, run: str, called: RegisteredStep, *, is_one_call: bool) -> None:
        """As `compare`, for a step of a loop that is called for the first time.

        is_one_call  whether the loop calls one function; otherwise functions of one name are compared, but no lambdas
        """
        if not is_one_call and "<lambda>" in called.name:
            return
        written = [one for one in (held() for held in called.written) if one is not None]
        key = f"{'' if is_one_call else called.name}{called.signature}"
        self.compare(run, key, written, applied_to(written))


def settings_of(optimizers: Iterable[GivenOptimizer]) -> list[ListedItem]:
    """Return an item for each setting of the optimizers."""
    texts = [f"of {one.name!r}: {setting}" for one in optimizers for setting in one.settings]
    return [ListedItem("setting", text, text) for text in texts]
