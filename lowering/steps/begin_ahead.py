"""Which tasks of a step must be released when it begins ahead of the task that starts it.

Why: a training loop fetches the parameters of its next step early. A part that begins ahead changes no state until it
is released (`Execution.release`), so that the loop may still be left. The first values that a part receives from the
starting task release it too. This file finds the parts that may change state before they receive such values.

The starting task's own part may begin ahead with the arguments of a later call, to send the row numbers of lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflow.lowering.steps.executable import Executable, may_change, needs
from dflow.lowering.steps.plan import Plan, Recv


def released_at_call(plans: Mapping[str, Plan], origin: str) -> tuple[str, ...] | None:
    """Return the tasks to release when the task `origin` calls the step; None if the step cannot begin ahead.

    plans  the plan of each task, by name. Plans with branches or loops cannot begin ahead
    """
    others = [plan for task, plan in plans.items() if task != origin]
    if any(plan.bodies for plan in others):
        return None
    return tuple(plan.task for plan in others if _changes_by_itself(plan, origin))


def why_not_own(executable: Executable, donated: Sequence[int]) -> str:
    """Return why the part of the starting task itself cannot begin ahead of the call; empty if it can.

    donated  the arguments that the part may overwrite
    """
    if executable.bodies:
        return "the function has branches or loops"
    if not executable.sends_of_feeds:
        return "the function sends nothing that its arguments alone determine, such as the ids of a lookup"
    return "the function donates arguments" if donated else ""


def _changes_by_itself(plan: Plan, origin: str) -> bool:
    """Whether an item may change state that comes after no receive from `origin` in this plan."""
    needed = needs(plan)
    released = {index for index, item in enumerate(plan.items) if isinstance(item, Recv) and item.source == origin}
    grows = True
    while grows:
        later = {index for index, before in enumerate(needed) if before & released} - released
        released |= later
        grows = bool(later)
    return any(may_change(item) and index not in released for index, item in enumerate(plan.items))
