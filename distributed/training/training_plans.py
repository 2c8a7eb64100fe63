"""The plans of trainers: the steps of a trainer's whole run. It consists of several runs that workers claim steps of.

Invariant: such a run is part of the plan whose name its own name begins with, and its steps count in the plan if the
run begins at the plan's first step or later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import msgspec

from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.training.plan_messages import TrainingPlan

#: By run, the numbers of steps done and of all steps.
Counts = Mapping[str, tuple[int, int]]
_PART = re.compile(r"(.*) ([0-9]+)-[0-9]+", re.DOTALL)


class TrainingPlans:
    """The plans of one cluster by name, kept in `records`."""

    def __init__(self, records: DurableRecords) -> None:
        self._records = records
        self._plans = dict(records.load(_PLAN, TrainingPlan))

    def note(self, plan: TrainingPlan) -> None:
        """Record a plan. A worker that is started again tells the steps that are done by then as earlier ones."""
        if (known := self._plans.get(plan.run)) is not None:
            plan = msgspec.structs.replace(
                plan, first=min(plan.first, known.first), is_over=plan.is_over or known.is_over
            )
        self._plans[plan.run] = plan
        self._records.put(_PLAN + plan.run, plan)

    def to_run_again(self, undone: Counts, before: Counts, counts: Counts) -> dict[str, tuple[int, int]]:
        """Return the runs that the program must run again, with their plan in place of its parts, and their counts.

        undone  runs that were complete, and are not any more
        before  the counts when they were; a plan that was not complete goes on, and repeats its parts
        """
        found = {}
        for run, count in undone.items():
            part = _PART.fullmatch(run)
            plan = self._plans.get(part[1]) if part is not None else None
            if plan is None:
                found[run] = count
            elif plan.is_over or self._done(plan, before) >= plan.total:
                found[plan.run] = self._done(plan, counts), plan.total
        return found

    def _done(self, plan: TrainingPlan, counts: Counts) -> int:
        parts = ((_PART.fullmatch(run), done) for run, (done, _) in counts.items())
        own = (done for part, done in parts if part is not None and part[1] == plan.run and int(part[2]) >= plan.first)
        return plan.first + sum(own)

    def steps(self, counts: Counts) -> tuple[int, int]:
        """Return the numbers of steps done and of all steps, from those of each run that workers take part in."""
        done_of, others = {name: plan.first for name, plan in self._plans.items()}, (0, 0)
        for run, (done, total) in counts.items():
            part = _PART.fullmatch(run)
            if part is None or part[1] not in self._plans:
                others = others[0] + done, others[1] + total
            elif int(part[2]) >= self._plans[part[1]].first:
                done_of[part[1]] += done
        totals = [done_of[name] if plan.is_over else plan.total for name, plan in self._plans.items()]
        return others[0] + sum(done_of.values()), others[1] + sum(totals)


def resumed_plans(records: DurableRecords, runs: Collection[str]) -> Iterator[tuple[str, TrainingPlan]]:
    """Yield the records of the plans that have a part among `runs`, for a cluster that goes on with these, with keys.

    Other plans begin where their program says. None is over: the program tells that again.
    """
    begun = {part[1] for run in runs if (part := _PART.fullmatch(run)) is not None}
    for key, plan in records.load(_PLAN, TrainingPlan):
        if key in begun:
            yield _PLAN + key, msgspec.structs.replace(plan, is_over=False)


_PLAN = "training plan/"
