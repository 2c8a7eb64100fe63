"""Admission of connections to a task: only members of the newest roster that the task has may use it.

Why: any process that knows a task's address can send to it. A process that never joined, or that the coordinator
declared dead, would change variables that others still use. A task may learn of a death later than others do: if it
handled their writes before, a late write of the dead task could replace them.

Invariants:

- a connection that this task opened, to an address of the roster, is a member's; any other is a member's once
  `Introduce` has named its life, while the roster lists that life of the connection's task as live;
- messages of a life that is newer than the roster are held, in order, until the roster lists that life or a later one,
  or the connection ends: messages of a task that has just joined may overtake the roster;
- so are messages of a sender that knows of a death in a later roster, until this task has that roster;
- each message of a connection that is no member's is delivered, refused or, with its connection, dropped.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.basic import Introduce
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import TaskLost

LOGGER = logging.getLogger("dflow")
#: Limit of messages held for a connection whose life the roster does not list; further ones are refused.
MOST_HELD = 256


#: A message, as two functions: one handles it, the other one answers it with an error.
_Arrived = tuple[Callable[[], None], Callable[[TaskLost], None]]


class MemberGate:
    """Delivers, holds or refuses the messages to the task `name`, by membership of the sender; thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Re-entrant: delivering a message may end its connection.
        self._lock = threading.RLock()
        self._newest: dict[str, TaskInfo] = {}
        self._version = 0
        #: The version of the roster with the newest death that this task knows of.
        self.death_known_at = 0
        #: Kept for closed connections too, while requests that came over them wait for a thread.
        self._introduced: weakref.WeakKeyDictionary[Peer, Introduce] = weakref.WeakKeyDictionary()
        self._held: dict[Peer, list[_Arrived]] = {}
        #: The connections whose messages need not pass `take`.
        self.members: frozenset[Peer] = frozenset()

    def opened(self, peer: Peer) -> None:
        """Admit a connection that this task opened."""
        with self._lock:
            self.members |= {peer}

    def introduced(self, peer: Peer, introduction: Introduce) -> None:
        """Record the life that a connection belongs to, and the roster that its messages need.

        Delivers or refuses its held messages if that roster is here.
        """
        with self._lock:
            self.members -= {peer}
            self._introduced[peer] = introduction
            self._held.setdefault(peer, [])
            self._decide(peer)

    def closed(self, peer: Peer) -> None:
        """Drop the held messages of a connection that has ended, which is no longer a member's."""
        with self._lock:
            self.members -= {peer}
            self._held.pop(peer, None)

    def take(self, peer: Peer, deliver: Callable[[], None], refuse: Callable[[TaskLost], None]) -> None:
        """Deliver, hold or refuse a message of a connection that is not in `members`.

        One of the two functions is called once, now or by a later call of another method.
        """
        with self._lock:
            if peer in self.members:
                deliver()
            elif (why := self._refusal(peer)) or (len(self._held[peer]) >= MOST_HELD and not self._is_listed(peer)):
                refuse(self._error(why or "too many messages came before the news that it has joined"))
            else:
                self._held[peer].append((deliver, refuse))

    def may_come_back(self, peer: Peer) -> bool:
        """Whether a connection is of the newest life of its task, also if that has left."""
        with self._lock:
            info, sent = self._newest.get(peer.name), self._introduced.get(peer)
            return info is not None and sent is not None and _life(info) == _life(sent)

    def refuse_departed(self, peer: Peer) -> None:
        """Raise TaskLost if the life that a connection belongs to has ended, since its message came or before."""
        with self._lock:
            why = self._refusal(peer) if peer in self._introduced else ""
        if why:
            raise self._error(why)

    def roster_changed(self, roster: Roster) -> None:
        """Apply a roster: connections introduced for lives that it does not list as live are no longer members.

        Held messages wait for `admit`.
        """
        # Of several lives of a task, the newest.
        newest = {info.task: info for info in sorted(roster.tasks, key=lambda info: info.life)}
        with self._lock:
            if not self._newest or any(map(self._has_died, newest.values())):
                self.death_known_at = roster.version
            self._newest, self._version = newest, roster.version
            for peer in [peer for peer in self.members if peer in self._introduced and not self._is_live(peer)]:
                self.members -= {peer}
                self._held[peer] = []

    def _has_died(self, info: TaskInfo) -> bool:
        """Whether a life that the last roster listed as live has died, by `info`, the newest entry of its task."""
        before = self._newest.get(info.task)
        if before is None or before.left_at_s is not None:
            return False
        return before.life != info.life or (info.left_at_s is not None and info.left not in NORMAL_ENDS)

    def introduction(self, own: TaskInfo) -> Introduce:
        """Return the message with which this task introduces itself; `own` is its entry in the roster."""
        return Introduce(own.life, own.incarnation, self.death_known_at)

    def admit(self) -> None:
        """Deliver or refuse the held messages, by the newest roster."""
        with self._lock:
            for peer in list(self._held):
                self._decide(peer)

    def _decide(self, peer: Peer) -> None:
        why = self._refusal(peer)
        if why or self._is_live(peer):
            messages, self._held[peer] = self._held[peer], []
            for deliver, refuse in messages:
                try:
                    refuse(self._error(why)) if why else deliver()
                except Exception:
                    LOGGER.exception("%s: a message of %s failed", self._name, peer.name)
        if self._is_live(peer):
            del self._held[peer]
            self.members |= {peer}

    def _is_live(self, peer: Peer) -> bool:
        return self._is_listed(peer) and self._introduced[peer].roster <= self._version

    def _is_listed(self, peer: Peer) -> bool:
        info = self._newest.get(peer.name)
        return info is not None and _life(info) == _life(self._introduced[peer]) and info.left_at_s is None

    def _refusal(self, peer: Peer) -> str:
        """Return why messages of a connection are refused; empty if its life is live, or newer than the roster."""
        sent, info, task = self._introduced.get(peer), self._newest.get(peer.name), short_task_name(peer.name)
        if sent is None:
            return f"{task} has not joined it; join by dflow.connect()"
        if info is None or info.life < sent.life:
            return ""
        if info.life > sent.life:
            return f"{task} has started again, and this is its earlier process; end it"
        if info.incarnation != sent.incarnation:
            return f"{task} is another process than the one that joined; end it"
        if info.left_at_s is None:
            return ""
        return f"{task} left at {info.left_at_s:.1f} s: {info.left}; join again by dflow.connect()"

    def _error(self, why: str) -> TaskLost:
        return TaskLost(f"{short_task_name(self._name)} serves only members of its cluster: {why}")


def _life(one: TaskInfo | Introduce) -> tuple[int, str]:
    return one.life, one.incarnation
