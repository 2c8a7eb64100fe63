"""This process as a member of a group that runs one program together, and its end when another member has died.

The coordinator's word ends a process, not JAX's: a collective may never return once a member has died or hangs, and
the thread that waits in it cannot be woken. The program gets an error first, where it waits for the other members in
Python. If it has not ended `GRACE_S` later, the process ends with a status that makes its launcher start it again.

Invariants:
- a member that fails leaves the cluster before it ends, so that the others end too;
- before the death of a member is known to all, none of the others is taken for the cause.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dflow.distributed.client.coordinator_client import BARRIER_GRACE_S, CoordinatorClient
from dflow.distributed.collectives.group_messages import (
    END,
    MAIN,
    AwaitLeaderWork,
    Exchange,
    GroupFormed,
    LeaderWork,
    LeaderWorkEnded,
    LeaderWorks,
)
from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.process.termination import STATUS as TERMINATED
from dflow.distributed.process.termination import Terminated
from dflow.distributed.wire.messages.roster import Roster
from dflow.lowering.queues.timers import TIMERS
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError, TaskLost

LOGGER = logging.getLogger("dflow")

#: Exit status of a process that ended because another member of its group has left: EX_TEMPFAIL, try again.
STATUS = 75
#: Time for the program to end after a member has left, in s.
GRACE_S = 3.0
#: Longest wait for members that still evaluate or export at the end of the program, in s.
END_S = 86_400.0
#: Time that a failing computation or program waits for the news that another member is the cause, in s.
CAUSE_S = 2.0


#: The group of this process, if it is in one.
_current: list[ProcessGroup] = []


def current_group() -> ProcessGroup | None:
    """Return the group of this process, which is in one at a time; None if it is in none."""
    return _current[0] if _current else None


class ProcessGroup:
    """This process as a member of a group; `current_group` returns it until `close`, which every member calls.

    If another member leaves by a fault, or the coordinator is lost, the process ends with `STATUS` after `GRACE_S`. At
    the exit of the program, a group that is not closed is closed, or the process ends without waiting for the others.

    formed     answer of the coordinator
    timeout_s  longest wait for the other members at a point of the program
    """

    def __init__(self, coordinator: CoordinatorClient, formed: GroupFormed, timeout_s: float) -> None:
        self._coordinator, self._timeout_s = coordinator, timeout_s
        #: The tasks of the group, by rank.
        self.members = formed.members
        self.rank = formed.members.index(coordinator.task)
        self._lives = frozenset(formed.lives)
        #: A number that no other group of the cluster has: a life is a member of one.
        self.number = max(formed.lives)
        self._numbers: Counter[str] = Counter()
        #: Number of works of rank 0 since the last exchange of the main thread, by name.
        self._works: Counter[LeaderWork] = Counter()
        self._is_closed = False
        #: Set when the group is over by a fault, and the description of that.
        self._is_lost, self._lost = threading.Event(), ""
        _current[:] = [self]
        coordinator.session.call_on_roster(self._look)
        # The other members end too: their coordinator has declared this one dead.
        coordinator.session.call_on_lost(self._lose)
        atexit.register(self._end_of_program)

    @property
    def names(self) -> tuple[str, ...]:
        """The short names of the members, by rank."""
        return tuple(map(short_task_name, self.members))

    def exchange(
        self, name: str, word: str = "", *, channel: str = MAIN, timeout_s: float | None = None
    ) -> tuple[str, ...]:
        """Give a word at a point of the program; return the words of all members, by rank, when all have come there.

        name     of the point, for errors; the same on all members
        channel  each thread that exchanges words uses its own, and none but the main thread `MAIN`
        timeout_s  longest wait, by default that of the group
        raises   TaskLost when a member has left; StrategyError when one is at another point of the program;
                 DeadlineExceeded with the members that have not come
        """
        if channel == MAIN:
            self._works.clear()
        self._numbers[channel] += 1
        task, number = self._coordinator.task, self._numbers[channel]
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        message = Exchange(task, channel, number, name, word, wait_s)
        return self._coordinator.ask(message, wait_s + BARRIER_GRACE_S).words

    def leader_work(self, name: str) -> LeaderWork:
        """Number the next work of the member of rank 0: equal on all members that come to this point. Sends nothing.

        name  of the work, for errors
        """
        first = LeaderWork(name, self._numbers[MAIN], 0)
        self._works[first] += 1
        return LeaderWork(name, first.point, self._works[first])

    @contextlib.contextmanager
    def leading(self, work: LeaderWork) -> Iterator[None]:
        """Return the context in which rank 0 does a work. It waits for no other member.

        Reports the begin of the work, and its end or error, to the coordinator, for members in `await_leader`.
        """
        self._tell_work(work)
        try:
            yield
        except BaseException as error:
            kind = type(error).__name__
            self._tell_work(work, has_ended=True, kind=kind, error=str(error) or kind)
            raise
        self._tell_work(work, has_ended=True)

    def _tell_work(self, work: LeaderWork, **how: Any) -> None:
        self._coordinator.ask(LeaderWorks(self._coordinator.task, work, **how))

    def await_leader(self, work: LeaderWork, timeout_s: float | None = None) -> LeaderWorkEnded:
        """Wait until the member of rank 0 has ended a work; the answer has the error if it failed.

        timeout_s  longest wait, by default that of the group
        raises     StrategyError when the member of rank 0 has gone on without the work; DeadlineExceeded; TaskLost
        """
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        request = AwaitLeaderWork(self._coordinator.task, work, wait_s)
        return self._coordinator.ask(request, wait_s + BARRIER_GRACE_S)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Return the context of a computation of all members: if the group is lost, an error becomes TaskLost.

        A collective fails when the connections from a lost member end, before the coordinator has noticed. So an error
        waits up to `CAUSE_S` for that news. Errors of dflow are raised as they are.
        """
        try:
            yield
        except DflowError:
            raise
        except Exception as error:
            if not self._is_lost.wait(CAUSE_S):
                raise
            raise TaskLost(
                f"the group of {', '.join(self.names)} is over: {self._lost}", "start its processes again"
            ) from error

    def close(self) -> None:
        """Wait until all members close the group; later ends of other members do not end this process.

        Raises the errors of `exchange`. A second call does nothing.
        """
        if self._is_closed:
            return
        self.exchange(END, timeout_s=END_S)
        self.abandon()

    def abandon(self) -> None:
        """Close the group without waiting for the other members. For them it ends when this task leaves the cluster."""
        self._is_closed = True
        _current.clear()
        atexit.unregister(self._end_of_program)

    def _look(self, roster: Roster) -> None:
        lost = [info for info in roster.tasks if info.life in self._lives and info.left_at_s is not None]
        faults = [
            f"{short_task_name(info.task)} has left: {info.left}" for info in lost if info.left not in NORMAL_ENDS
        ]
        if faults:
            self._lose("; ".join(faults))

    def _lose(self, why: str) -> None:
        """Mark the group as lost, log why, and end the process after `GRACE_S` unless the group is closed by then.

        Does nothing if the group is lost or closed.
        """
        if self._is_lost.is_set() or self._is_closed:
            return
        self._lost = why
        LOGGER.error(
            "%s, so the collectives of %s cannot go on, and this process ends; it has to be started again",
            self._lost,
            ", ".join(self.names),
        )
        self._is_lost.set()
        # By a thread that runs already: from Python 3.12 on none can be started once the program exits.
        TIMERS.after(GRACE_S, self._end_unless_closed)

    def _end_unless_closed(self) -> None:
        if not self._is_closed:
            _end_now(STATUS)

    def _end_of_program(self) -> None:
        """At the exit of the program, close the group; after a failure, end the process without waiting for the others.

        After SIGTERM or an error of the program, the task leaves the cluster, so that the others end too.
        Why: JAX waits at its own exit for members that wait for this process in a collective.
        """
        has_failed = hasattr(sys, "last_type")  # Python sets it when it prints the error that ends the program
        if Terminated.raised is not None:
            if Terminated.raised.is_agreed:
                with contextlib.suppress(DflowError):
                    self.close()  # before that, the checkpoint of another member may not be complete
            self._coordinator.leave(Terminated.raised.reason)
            _end_now(TERMINATED)
        if has_failed and not self._is_lost.wait(CAUSE_S):
            self._coordinator.leave("its program has failed")
        if self._is_lost.is_set():
            _end_now(STATUS)
        try:
            self.close()
        except DflowError as error:
            if not has_failed:
                LOGGER.error("%s", error)
            _end_now(1)


def _end_now(status: int) -> None:
    """Flush the logs and streams, and end the process without its exit handlers, which would wait for other members."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed
            stream.flush()
    os._exit(status)
