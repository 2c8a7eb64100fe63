"""Faults planted in the code that decides, one at a time: the simulator has to find each of them.

`python -m tests.simulation.mutations` says for each by which schedule and which invariant it was found.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dflow.distributed import (
    barriers,
    coordinator_session,
    coordinator_state,
    elections,
    membership,
    rendezvous,
    step_ledger,
    task_channel,
    task_server,
)
from dflow.distributed.coordinator_events import Disconnect, Reply
from dflow.distributed.messages import Claimed
from dflow.distributed.simulation.faults import parse_faults
from dflow.distributed.simulation.world import Ended, Schedule, simulate

#: Within so many schedules each has to be found.
SCHEDULES = 150

Made = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutation:
    """`attribute` of `owner` replaced by `made(what it was)`; `found_by` is the invariant that fails then.

    `faults` are those of the schedules that shall find it, drawn from their seeds when None.
    """

    says: str
    owner: Any
    attribute: str
    made: Made
    found_by: str
    faults: str | None = None


def _giving(result: Any) -> Made:
    return lambda original: lambda *args, **kwargs: result


def _doing_nothing(original: Any) -> Any:
    return lambda *args, **kwargs: []


def _without(kind: type) -> Made:
    return lambda original: lambda *args: [command for command in original(*args) if not isinstance(command, kind)]


def _deaf_to(kind: type) -> Made:
    return lambda original: lambda self, event: [] if isinstance(event, kind) else original(self, event)


def _forget_the_claim(original: Any) -> Any:
    def leave(run: Any, task: str, reason: str) -> Any:
        if task in run.workers:
            run.workers[task] = msgspec.structs.replace(run.workers[task], held=0)
        return original(run, task, reason)

    return leave


def _settling(give_back: Callable[[Any, range, int], None]) -> Made:
    """Settle a claim, and do something with the steps that were held and the number that were done."""

    def made(original: Any) -> Any:
        def settle(run: Any, claim: Any) -> int:
            worker = run.workers.get(claim.task)
            held = range(0) if worker is None else range(worker.first, worker.first + worker.held)
            done: int = original(run, claim)
            give_back(run, held, done)
            return done

        return settle

    return made


def _give_back_what_is_done(run: Any, held: range, done: int) -> None:
    run._give_back(held[:done])


def _give_nothing_back(run: Any, held: range, done: int) -> None:
    run.pool = [part for part in run.pool if part.start not in held[done:]]


def _count_one_less(run: Any, held: range, done: int) -> None:
    if done:
        run.done -= 1
        run._give_back(held[done - 1 : done])


def _say_complete_too_early(original: Any) -> Any:
    def answer_waiting(run: Any) -> Any:
        early = [Reply(run.waiting.pop(task), Claimed(0, 0)) for task in list(run.waiting) if not run.pool]
        return [*early, *original(run)]

    return answer_waiting


def _deliver_and_still_wait(original: Any) -> Any:
    def put(meeting: Any, step: Any, edge: str, value: Any) -> Any:
        opened = meeting._steps.get(step)
        place = opened.edges.get(edge) if opened is not None else None
        commands = original(meeting, step, edge, value)
        if commands:
            opened.edges[edge] = place
        return commands

    return put


#: What is on its way for a worker finds its next life.
_RESTARTS = "loss=0.3,late=0.3,kill=worker:0@4.7+0.05,kill=worker:1@2.7+0.05,kill=worker:2@3.6+0.05"


def _keep_the_old_life(original: Any) -> Any:
    def release(members: Any, tasks: list[str], at_s: float, reason: str = "") -> Any:
        return [] if reason == "it has started anew" else original(members, tasks, at_s, reason)

    return release


def _pass_early(original: Any) -> Any:
    def pass_if_complete(self: Any, name: str, barrier: Any) -> Any:
        if 1 < len(barrier.here) < len(barrier.generation.members):
            arrivals, barrier.here = barrier.here, {}
            return [Reply(arrival.ask, barriers._answer(barrier.generation)) for arrival in arrivals.values()]
        return original(self, name, barrier)

    return pass_if_complete


def _tell_each_another(original: Any) -> Any:
    versions = itertools.count()
    return lambda generation: msgspec.structs.replace(original(generation), version=next(versions))


def _set_for_now(original: Any) -> Any:
    def set(offices: Any, what: str, office: Any) -> Any:
        offices._offices[what] = office
        return office

    return set


def _changed_for_now(original: Any) -> Any:
    def changed(members: Any, life: int) -> None:
        original(members, life)
        members._records._changed.pop(f"life/{life:012d}", None)

    return changed


def _saving_nothing(original: Any) -> Any:
    def save(run: Any, worker: Any = None) -> None:
        if worker is not None:
            run.note(worker)

    return save


_BARRIERS = barriers.Barriers
_SESSION = coordinator_session.CoordinatorSession
_RUN, _MEETING, _MEMBERS = step_ledger._Run, rendezvous.Rendezvous, membership.Membership

MUTATIONS = (
    Mutation("steps of a worker that left are lost", _RUN, "leave", _forget_the_claim, "none lost"),
    Mutation("done steps go back to the pool", _RUN, "settle", _settling(_give_back_what_is_done), "done once"),
    Mutation("steps that are given up are lost", _RUN, "settle", _settling(_give_nothing_back), "none lost"),
    Mutation("the last step of a report does not count", _RUN, "settle", _settling(_count_one_less), "done once"),
    Mutation("a run does not outlive the coordinator", _RUN, "_save", _saving_nothing, "done once"),
    Mutation(
        "members do not outlive the coordinator",
        membership.Membership,
        "_changed",
        _changed_for_now,
        "rosters in order",
    ),
    Mutation("offices do not outlive the coordinator", elections.Elections, "_set", _set_for_now, "one in office"),
    Mutation("a run is called complete too early", _RUN, "answer_waiting", _say_complete_too_early, "none lost"),
    Mutation("a task's old life stays", _MEMBERS, "_release", _keep_the_old_life, "one of a name"),
    Mutation("silence is not noticed", _MEMBERS, "handle", _deaf_to(membership.Ticked), "none lost"),
    Mutation(
        "who is given up is not disconnected",
        coordinator_state.CoordinatorState,
        "handle",
        _without(Disconnect),
        "none lost",
    ),
    Mutation("a barrier passes before all have come", _BARRIERS, "_pass_if_complete", _pass_early, "one view"),
    Mutation("each is told of another barrier", barriers, "_answer", _tell_each_another, "one view"),
    Mutation("whoever asks is elected", elections.Elections, "elect", _giving(True), "one in office"),
    Mutation("ended steps are forgotten", rendezvous._Ended, "__contains__", _giving(False), "nothing left"),
    Mutation("values for a past life are kept", _MEETING, "count_from", _doing_nothing, "nothing left", _RESTARTS),
    Mutation("a value is delivered each time it comes", _MEETING, "put", _deliver_and_still_wait, "none lost"),
    Mutation("an ask is not asked again", _SESSION, "_send_all", _doing_nothing, "none lost"),
    Mutation("waits do not expire", task_channel.TaskChannel, "_expire", _doing_nothing, "waits end"),
    Mutation("what a step left is kept", task_channel.TaskChannel, "finish", _doing_nothing, "nothing left"),
    Mutation("a run that ends tells nobody", task_server, "_answer_run", _doing_nothing, "none lost"),
)


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The mutation is in the code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutation.owner, mutation.attribute, mutation.made(getattr(mutation.owner, mutation.attribute)))
        yield


def find(mutation: Mutation, schedules: int = SCHEDULES) -> Ended | None:
    """How the first schedule ended in which an invariant failed; None if there is none."""
    faults = None if mutation.faults is None else parse_faults(mutation.faults)
    with planted(mutation):
        all_ended = (simulate(Schedule(seed, faults=faults)) for seed in range(schedules))
        return next((ended for ended in all_ended if ended.broken), None)


if __name__ == "__main__":
    logging.getLogger("dflow").setLevel(logging.CRITICAL)
    for mutation in MUTATIONS:
        found = find(mutation)
        print(f"{mutation.says}: {found.schedule.seed if found else '-'}: {found.broken if found else 'NOT FOUND'}")
