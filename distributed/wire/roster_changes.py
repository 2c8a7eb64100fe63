"""Rosters as changes of earlier ones: applied by receivers, and computed where many similar rosters are sent."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.roster import Roster, RosterChange


def changed_roster(roster: Roster, change: RosterChange) -> Roster:
    """Return the roster after the change."""
    tasks = {info.life: info for info in roster.tasks} | {info.life: info for info in change.entries}
    for life in change.dropped:
        tasks.pop(life, None)
    joined = {info.task for info in change.entries}
    expected = tuple(task for task in roster.expected if task not in joined)
    return msgspec.structs.replace(
        roster,
        tasks=tuple(tasks.values()),
        expected=expected,
        version=change.version,
        epoch=change.epoch,
        mark=change.mark,
    )


def change_between(earlier: Roster, later: Roster) -> RosterChange:
    """Return the change from `earlier` to `later`, two rosters of the same start of the same coordinator."""
    known = {info.life: info for info in earlier.tasks}
    entries = tuple(info for info in later.tasks if known.pop(info.life, None) != info)
    return RosterChange(earlier.version, later.version, entries, tuple(known), later.epoch, mark=later.mark)
