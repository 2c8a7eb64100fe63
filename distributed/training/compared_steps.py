"""Description of a worker's step, for the coordinator to compare: the variables written and the optimizers' settings.

Constants of a step, such as keys for noise, may differ between workers that train asynchronously or average their
gradients. The variables that they train, and the rules of the updates, may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from dflow.distributed.steps.steps_ahead import RegisteredStep
from dflow.distributed.training.applying import GivenOptimizer, applied_to
from dflow.distributed.training.comparison_messages import CompareStep
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.tracing.syntax.listing import ListedItem

#: Longest wait for the coordinator, which may be started again meanwhile, in s.
COMPARE_S = 600.0


class AsksCoordinator(Protocol):
    """The part of the coordinator's client that is needed here."""

    #: The full name of this task.
    task: str

    def ask(self, message: Request[Answer], timeout_s: float) -> Answer:
        """Send the coordinator a request, and return its answer; wait for a coordinator that is away."""
        ...


def compare_step(
    coordinator: AsksCoordinator, run: str, key: str, written: Iterable[Any], optimizers: Sequence[GivenOptimizer]
) -> None:
    """Raise StrategyError if another worker of the run has a step of this key that writes or updates otherwise."""
    names = sorted({f"variable {one.name!r} {one.type}" for one in written})
    items = (*names, *(f"{item.kind} {item.text}" for item in settings_of(optimizers)))
    message = CompareStep(run, coordinator.task, key, hashlib.sha256(json.dumps(items).encode()).hexdigest())
    if not coordinator.ask(message, COMPARE_S).is_known:
        coordinator.ask(replace(message, items=items or ("no variable",)), COMPARE_S)


def compare_call(coordinator: AsksCoordinator, run: str, called: RegisteredStep, *, is_one_call: bool) -> None:
    """As `compare_step`, for a step of a loop that is called for the first time.

    is_one_call  whether the loop calls one function; otherwise functions of one name are compared
    """
    if not is_one_call and "<lambda>" in called.name:
        return
    written = [one for one in (held() for held in called.written) if one is not None]
    key = f"{'' if is_one_call else called.name}{called.signature}"
    compare_step(coordinator, run, key, written, applied_to(written))


def settings_of(optimizers: Iterable[GivenOptimizer]) -> list[ListedItem]:
    """Return an item for each setting of the optimizers."""
    texts = [f"of {one.name!r}: {setting}" for one in optimizers for setting in one.settings]
    return [ListedItem("setting", text, text) for text in texts]
