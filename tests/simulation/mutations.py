"""Faults planted in the code that decides, one at a time: the simulator has to find each of them.

`python -m tests.simulation.mutations` says for each by which schedule and which invariant it was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from dflow.distributed.asynchronous import async_, claimed_run, staleness
from dflow.distributed.client import coordinator_session, session_driver
from dflow.distributed.coordinator import barriers, coordinator_state, decisions, membership, variable_directory
from dflow.distributed.coordinator.coordinator_events import Disconnect, SendReply
from dflow.distributed.steps import deadlines, plan_runs, rendezvous, steps_ahead, task_channel
from dflow.distributed.synchronous import rounds
from dflow.distributed.task import member_gate, task_server
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.distributed.transport import session as transport_session
from dflow.lowering.queues import accumulator_machine, accumulators
from dflow.lowering.state import applied_steps
from dflow.lowering.values.index_set import IndexSet
from tests.simulation.fault_schedule import FaultSchedule, ScheduleResult, simulate
from tests.simulation.faults import parse_faults
from tests.simulation.moment_mutations import MOMENT_MUTATIONS
from tests.simulation.planting import Made, Mutation, change_is_new, doing_nothing, giving
from tests.simulation.programs import ROUND_SNAPSHOTS, ROUNDS, SNAPSHOTS, STEPS, VARIABLES
from tests.simulation.round_snapshot_mutations import ROUND_SNAPSHOT_MUTATIONS
from tests.simulation.snapshot_mutations import SNAPSHOT_MUTATIONS

#: How much is done in a schedule of each program.
STEPS_OF = {STEPS: 9, ROUNDS: 4, VARIABLES: 4, SNAPSHOTS: 6, ROUND_SNAPSHOTS: 5}
#: Within so many schedules each has to be found.
SCHEDULES = 150
_DIRECTORY = variable_directory.VariableDirectory
_STATE = coordinator_state.CoordinatorState


def _without(kind: type) -> Made:
    return lambda original: lambda *args: [command for command in original(*args) if not isinstance(command, kind)]


def _deaf_to(kind: type) -> Made:
    return lambda original: lambda self, event: [] if isinstance(event, kind) else original(self, event)


def _forget_the_claim(original: Any) -> Any:
    def leave(run: Any, task: str, reason: str) -> Any:
        if task in run.workers:
            run.workers[task] = msgspec.structs.replace(run.workers[task], count=0)
        return original(run, task, reason)

    return leave


def _settling(give_back: Callable[[Any, range, int], None]) -> Made:
    """Settle a claim, and do something with the steps that were held and the number that were done."""

    def made(original: Any) -> Any:
        def settle(run: Any, claim: Any) -> int:
            worker = run.workers.get(claim.task)
            held = range(0) if worker is None else worker.held
            done: int = original(run, claim)
            give_back(run, held, done)
            return done

        return settle

    return made


def _give_back_what_is_done(run: Any, held: range, done: int) -> None:
    run.pool.add(held[:done])


def _give_nothing_back(run: Any, held: range, done: int) -> None:
    run.pool = IndexSet(part for part in run.pool.ranges() if part.start not in held[done:])


def _count_one_less(run: Any, held: range, done: int) -> None:
    if done:
        run.done -= 1
        run.pool.add(held[done - 1 : done])


def _say_complete_too_early(original: Any) -> Any:
    def answer_waiting(run: Any) -> Any:
        early = [SendReply(run.waiting.pop(task), Claimed(0, 0)) for task in list(run.waiting) if not run.pool]
        return [*early, *original(run)]

    return answer_waiting


def _deliver_twice(original: Any) -> Any:
    def put(meeting: Any, step: Any, edge: str, value: Any) -> Any:
        return 2 * original(meeting, step, edge, value)

    return put


def _keep_the_old_life(original: Any) -> Any:
    def release(members: Any, tasks: list[str], at_s: float, reason: str = "") -> Any:
        return [] if reason == "it was started again" else original(members, tasks, at_s, reason)

    return release


def _pass_early(original: Any) -> Any:
    def pass_if_complete(self: Any, barrier: Any) -> Any:
        here = barrier.here()
        if 1 < len(here) < len(barrier.generation.members):
            return [SendReply(barrier.waiting.pop(task).ask, barriers._answer(barrier.generation)) for task in here]
        return original(self, barrier)

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
        members._records.changed.pop(f"life/{life:012d}", None)

    return changed


def _saving_nothing(original: Any) -> Any:
    def save(run: Any, worker: Any = None) -> None:
        if worker is not None:
            run.note(worker)

    return save


def _saying_nothing_again(original: Any) -> Any:
    def resume(session: Any, peer_received: int) -> Any:
        released = original(session, peer_received)
        session.retained.clear()
        return released

    return resume


def _one_more(original: Any) -> Any:
    return lambda link: original(link) + 1


def _never_due(original: Any) -> Any:
    def receive(link: Any, number: int, size_bytes: int) -> Any:
        is_new = original(link, number, size_bytes)
        link.ack_due = False
        return is_new

    return receive


def _ending_any(original: Any) -> Any:
    return lambda steps, worker, number, **options: original(steps, worker, 1 << 62, **options)


def _keeping(original: Any) -> Any:
    def answer(accumulator: Any, command: Any) -> Any:
        before = accumulator._sum
        answered = original(accumulator, command)
        accumulator._sum = accumulator._sum or before
        return answered

    return answer


def _the_old(original: Any) -> Any:
    return lambda accumulator, total, gradient, where: total or original(accumulator, total, gradient, where)


def _all_kept(original: Any) -> Any:
    return lambda accumulator, tickets, where: original(accumulator, [*accumulator._kept], where)


def _one_less(original: Any) -> Any:
    return lambda run: [rounds.SetEnough(max(1, command.count - 1)) for command in original(run)]


def _done_before(original: Any) -> Any:
    return lambda run, ask, worker, done: original(run, ask, worker, done - 1)


def _once_failed(original: Any) -> Any:
    return lambda run, *opened: [] if run.failed else original(run, *opened)


def _not_counted(original: Any) -> Any:
    def fail(run: Any, *failure: Any) -> Any:
        commands = original(run, *failure)
        run.failed -= 1
        return commands

    return fail


def _by_attempt(original: Any) -> Any:
    def begins(attempt: Any, keys: Any, one: Any) -> Any:
        attempt._applied.whole = IndexSet()
        return original(attempt, keys, one)

    return begins


def _without_number(original: Any) -> Any:
    return lambda runs, step, of=None: original(runs, step)


def _without_roster(original: Any) -> Any:
    return lambda gate, own: msgspec.structs.replace(original(gate, own), roster=0)


def _a_failed_step_as_done(original: Any) -> Any:
    def run(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        worker = strategy.cluster
        ask = worker.ask

        def report_one_more(message: Any, *timeout_s: float) -> Any:
            if isinstance(message, ClaimSteps) and not message.more:
                message = msgspec.structs.replace(message, done=message.done + 1)
            return ask(message, *timeout_s)

        worker.ask = report_one_more
        try:
            yield from original(strategy, *args, **kwargs)
        finally:
            worker.ask = ask

    return run


#: The host of the rounds and another task cannot reach each other for a while, from the first update on, and both live.
_APART = "cut=ps:0/ps:1@0.4134+14"

#: Workers die, and come back when the rounds should be over.
_DIES = "kill=worker:1@0.6+60,kill=worker:2@1+60"

#: The first elected worker hangs and is declared dead; it writes after its successor, before the ps tasks know.
_LATE_NEWS = (
    "hang=worker:1@0+9.8,hang=worker:2@0+9.8,hang=worker:0@2.5+10.6,"
    "cut=ps:0/coordinator@10.5+3.5,cut=ps:1/coordinator@10.5+3.5"
)

#: Connections go over one stream after the other.
_BREAKS = "breaks=0.15"

_DRIVER = session_driver.SessionDriver
_BARRIERS = barriers.Barriers
_SESSION = coordinator_session.CoordinatorSession
_ACCUMULATOR, _ROUNDS = accumulator_machine.AccumulatorMachine, rounds.Rounds
_HELD = accumulators.HeldAccumulator
_LINK = transport_session.Session
_ATTEMPT = applied_steps.StepAttempt
_RUN, _MEETING, _MEMBERS = claimed_run.ClaimedRun, rendezvous.Rendezvous, membership.Membership

#: Notices come late and twice.
_TWICE = "twice=0.3,mixed=0.3"

MUTATIONS = (
    Mutation("steps of a worker that left are lost", _RUN, "leave", _forget_the_claim, "none lost"),
    Mutation("done steps go back to the pool", _RUN, "settle", _settling(_give_back_what_is_done), "done once"),
    Mutation("steps that are given up are lost", _RUN, "settle", _settling(_give_nothing_back), "none lost"),
    Mutation("the last step of a report does not count", _RUN, "settle", _settling(_count_one_less), "done once"),
    Mutation("a run does not outlive the coordinator", _RUN, "_save", _saving_nothing, "done once"),
    Mutation("members do not outlive the coordinator", _MEMBERS, "_changed", _changed_for_now, "rosters in order"),
    Mutation("offices do not outlive the coordinator", decisions.Decisions, "_set", _set_for_now, "one in office"),
    Mutation("a run is called complete too early", _RUN, "answer_waiting", _say_complete_too_early, "none lost"),
    Mutation("a task's old life stays", _MEMBERS, "_release", _keep_the_old_life, "one of a name"),
    Mutation("a holder is given no more time than others", _DIRECTORY, "holds_state", giving(False), "holder kept"),
    Mutation("silence is not noticed", _MEMBERS, "tick", doing_nothing, "none lost"),
    Mutation("who is given up is not disconnected", _STATE, "handle", _without(Disconnect), "none lost"),
    Mutation("a barrier passes before all have come", _BARRIERS, "_pass_if_complete", _pass_early, "one view"),
    Mutation("each is told of another barrier", barriers, "_answer", _tell_each_another, "one view"),
    Mutation("whoever asks is elected", decisions.Decisions, "elect", giving(True), "one in office"),
    Mutation("ended steps are forgotten", _MEETING, "_has_ended", giving(False), "nothing left"),
    Mutation("a task's gate hears of no members", member_gate.MemberGate, "roster_changed", doing_nothing, "none lost"),
    Mutation("a value is delivered twice", _MEETING, "put", _deliver_twice, "nothing raises"),
    Mutation("an ask is not asked again", _SESSION, "_send_all", doing_nothing, "none lost"),
    Mutation("a lost coordinator is not called again", _DRIVER, "_try_to_open", doing_nothing, "none lost"),
    Mutation("the coordinator's answers are dropped", _DRIVER, "_reply_came", doing_nothing, "none lost"),
    Mutation("a failed step is reported as done", async_.Async, "run", _a_failed_step_as_done, "none lost"),
    Mutation("a task records no applied step", _ATTEMPT, "_begins", change_is_new, "applied once"),
    Mutation("the end of a part is not recorded", _ATTEMPT, "_begins", _by_attempt, "applied once"),
    Mutation("all steps count as applied", _ATTEMPT, "_begins", giving((False, None)), "none lost"),
    Mutation("the release of a step brings no number", plan_runs.PlanRuns, "release", _without_number, "applied once"),
    Mutation("waits have no deadline", deadlines.Deadlines, "begin", giving(1e9), "waits end"),
    Mutation("waits do not expire", task_channel.TaskChannel, "_expire", doing_nothing, "waits end"),
    Mutation("what a step left is kept", task_channel.TaskChannel, "finish", doing_nothing, "nothing left"),
    Mutation("steps begun ahead are not cancelled", steps_ahead.StepsAhead, "cancel", doing_nothing, "nothing left"),
    Mutation("steps begin above the bound", staleness.BoundedSteps, "_is_full", giving(False), "bounded staleness"),
    Mutation("a late end ends a later step", staleness.BoundedSteps, "end", _ending_any, "bounded staleness", _TWICE),
    Mutation("a run ends without an answer", task_server, "answer_run", doing_nothing, "none lost"),
    Mutation("what was not heard is not said again", _LINK, "resume", _saying_nothing_again, "heard once", _BREAKS),
    Mutation("more is called heard than was", _LINK, "say_received", _one_more, "heard once", _BREAKS),
    Mutation("what is acknowledged is kept", _LINK, "acknowledge", doing_nothing, "bounded"),
    Mutation("nothing is acknowledged in itself", _LINK, "receive", _never_due, "bounded"),
    Mutation("a stale gradient counts", _ACCUMULATOR, "is_fresh", giving(True), "counted once", program=ROUNDS),
    Mutation("a sum is not reset", accumulators.HeldAccumulator, "_answer", _keeping, "counted once", program=ROUNDS),
    Mutation("a gradient is lost", _HELD, "_with", _the_old, "first m", program=ROUNDS),
    Mutation("a task sums others than the host", _HELD, "_sum_of", _all_kept, "applied once", program=ROUNDS),
    Mutation("one gradient less is enough", _ROUNDS, "_enough", _one_less, "first m", program=ROUNDS),
    Mutation("a dead worker is waited for", _ROUNDS, "leave", doing_nothing, "the dead", _DIES, ROUNDS),
    Mutation("fewer are not enough", _ACCUMULATOR, "set_enough", doing_nothing, "the dead", _DIES, ROUNDS),
    Mutation("a round is told of again", _ROUNDS, "ready", _done_before, "later rounds", program=ROUNDS),
    Mutation("a failed update fails the run for ever", _ROUNDS, "open", _once_failed, "none lost", _APART, ROUNDS),
    Mutation("no process is recorded", _MEMBERS, "process", giving(""), "one life", program=VARIABLES),
    Mutation(
        "a write may come before the news of the death that led to it",
        member_gate.MemberGate,
        "introduction",
        _without_roster,
        "one writes",
        _LATE_NEWS,
        VARIABLES,
    ),
    Mutation("a failed update counts as a round", _ROUNDS, "_fail", _not_counted, "none lost", _APART, ROUNDS),
    *MOMENT_MUTATIONS,
    *SNAPSHOT_MUTATIONS,
    *ROUND_SNAPSHOT_MUTATIONS,
)


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The mutation is in the code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutation.owner, mutation.attribute, mutation.made(getattr(mutation.owner, mutation.attribute)))
        yield


def find(mutation: Mutation, schedules: int = SCHEDULES) -> ScheduleResult | None:
    """Return the end of the first schedule that breaks the mutation's invariant; None if no schedule does.

    A schedule that raises names no invariant, so the next one is tried.
    """
    faults = None if mutation.faults is None else parse_faults(mutation.faults)
    with planted(mutation):
        steps = STEPS_OF[mutation.program]
        for seed in range(schedules):
            with suppress(Exception):
                ended = simulate(FaultSchedule(seed, steps=steps, faults=faults, program=mutation.program))
                if ended.broken.startswith(mutation.found_by):
                    return ended
    return None


if __name__ == "__main__":
    for mutation in MUTATIONS:
        found = find(mutation)
        print(f"{mutation.says}: {found.schedule.seed if found else '-'}: {found.broken if found else 'NOT FOUND'}")
