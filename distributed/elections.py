"""Which one task does a thing that shall be done once, such as making a first value or writing a summary.

Invariants:
- the first live task that asks is elected, and is told so each time it asks;
- the elected keeps its office while it is live and after a normal end, since it has then done what it was for;
- when it left for any other reason, the next to ask is elected in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflow.distributed.membership import NORMAL_ENDS


@dataclass
class _Office:
    """Who holds it, over which connection, and whether that one has failed."""

    task: str
    peer: int
    vacant: bool = False


class Elections:
    """The offices of one cluster."""

    def __init__(self) -> None:
        self._offices: dict[str, _Office] = {}

    def elect(self, what: str, task: str, peer: int) -> bool:
        """Whether the live task behind `peer` is the one for `what`."""
        office = self._offices.get(what)
        if office is None or office.vacant:
            self._offices[what] = office = _Office(task, peer)
        return (office.task, office.peer) == (task, peer)

    def leave(self, peer: int, reason: str) -> None:
        """The task behind `peer` is no longer live."""
        for office in self._offices.values():
            if office.peer == peer and reason not in NORMAL_ENDS:
                office.vacant = True
