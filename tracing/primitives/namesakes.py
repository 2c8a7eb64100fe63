"""The warning about namesakes, several variables or queues of one name: they are separate here, but one on a cluster.

The warning comes when an earlier namesake is used, not when the later one is created: a program that runs again, such
as a notebook cell, creates its variables again, while caches may keep the unused old ones alive. A call of a compiled
step does not check its variables. Instead, a new namesake marks the steps that use an earlier one (`StepResources`),
and their next call warns. There is no warning about names that dflow makes up.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from dflow.tracing.source import Loc, at, warn_at
from dflow.tracing.weak_by_identity import WeakDict


class DuplicateNameWarning(UserWarning):
    """Warns that several variables (or queues, or accumulators) share a name; on a cluster they are one variable."""


#: The living resources of a kind and a name in a home. Each keeps its group alive.
_groups: WeakValueDictionary[tuple[str, str, Any], WeakDict[Any, None]] = WeakValueDictionary()
#: Resources that were warned of.
_warned: WeakDict[Any, None] = WeakDict()
#: The compiled steps that use a resource.
_steps: WeakDict[Any, WeakDict[StepResources, None]] = WeakDict()
#: Entered again where the collector runs a user's `__del__` inside.
_lock = threading.RLock()


class StepResources:
    """The resources that a compiled step uses.

    `has_namesakes`  whether one of them got a namesake since the last `warn`
    `on_namesake`    is called when one gets a namesake, on the thread that makes it
    """

    def __init__(self, resources: Iterable[Any]) -> None:
        self._resources: WeakDict[Any, None] = WeakDict()
        self.has_namesakes = False
        self.on_namesake: Callable[[], None] = lambda: None
        with _lock:
            for resource in resources:
                self._resources[resource] = None
                _steps.setdefault(resource, WeakDict())[self] = None

    def warn(self) -> None:
        """Warn as `warn_of_namesakes` does."""
        self.has_namesakes = False
        warn_of_namesakes([*self._resources])


def joined_namesakes(resource: Any) -> WeakDict[Any, None]:
    """Return the living resources of this one's kind, name and home, and add it to them."""
    with _lock:
        group = _groups.setdefault((resource.kind, resource.name, resource.home), WeakDict())
        steps = {step for earlier in group for step in _steps.get(earlier, ())}
        group[resource] = None
    for step in steps:
        step.has_namesakes = True
        step.on_namesake()
    return group


def use_beside_namesakes(resources: Iterable[Any]) -> None:
    """Exempt resources from warnings about namesakes, because they are copies: variables of a loaded model, say."""
    for resource in resources:
        with _lock:
            resource.namesakes.pop(resource, None)
        resource.namesakes = WeakDict()


def warn_of_namesakes(used: Iterable[Any]) -> None:
    """Warn of used resources that have a later namesake: once for each, at the line that made the namesake."""
    names: defaultdict[tuple[str, bool, Loc | None, Loc | None], list[str]] = defaultdict(list)
    for resource in used:
        if len(resource.namesakes) > 1 and (later := _later(resource)) is not None:
            names[resource.kind, resource.home.shares_names, resource.loc, later.loc].append(resource.name)
    for key, those in names.items():
        _warn(those, *key)


def _later(resource: Any) -> Any:
    """The first namesake made after this resource, if both names were given and there was no warning yet."""
    with _lock:
        if not resource.is_named or resource in _warned:
            return None
        later = [each for each in resource.namesakes if each.serial > resource.serial and each.is_named]
        if later:
            _warned[resource] = None
    return min(later, key=lambda each: each.serial, default=None)


def _warn(names: list[str], kind: str, are_one: bool, first: Loc | None, second: Loc | None) -> None:
    shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    fact = f"both are one {kind} here" if are_one else "here they are separate, and on a cluster both are one"
    text = (
        f"{kind}{'s' * (len(names) > 1)} {shown}: expected an unused name, got that of one in use: "
        f"{fact}{at(second)}\n"
        f"  the one in use was made{at(first)}\n"
        "  give one of the two another name or `prefix=`, or its own `dflow.container(...)`, or use the later alone"
    )
    warn_at(second, text, DuplicateNameWarning)
