"""Traffic of the edges between tasks: of an interval, and grouped by the jobs of their ends."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from dflow.distributed.wire.messages.roster import EdgeTraffic, summed
from dflow.distributed.wire.messages.status import Status
from dflow.tracing.devices.task_name import short_task_name


def recent_traffic(before: Status, now: Status) -> list[EdgeTraffic]:
    """Return the traffic between two statuses, by edge; edges without any are left out."""
    earlier = {entry.key: entry for entry in before.traffic}
    found = []
    for entry in now.traffic:
        known = earlier.get(entry.key) or replace(entry, values=0, size_bytes=0, messages=0)
        sent = replace(
            entry,
            values=entry.values - known.values,
            size_bytes=entry.size_bytes - known.size_bytes,
            messages=max(entry.messages - known.messages, 0),
        )
        if sent.values > 0 and sent.size_bytes >= 0:
            found.append(sent)
    return found


def grouped_traffic(traffic: Iterable[EdgeTraffic]) -> list[EdgeTraffic]:
    """Return the traffic, largest first, with one row for all tasks of a job that have the same role for an edge.

    Tasks have their short names, and `job:*` stands for several of a job.
    """
    rows = [
        replace(row, source=short_task_name(row.source), destination=short_task_name(row.destination))
        for row in traffic
    ]
    rows = _grouped(_grouped(rows, "destination", "source"), "source", "destination")
    return sorted(rows, key=lambda row: (-row.size_bytes, row.key))


def _grouped(rows: Iterable[EdgeTraffic], end: str, other: str) -> list[EdgeTraffic]:
    """Return the rows, those joined that differ only in the task of a job at one `end`."""
    groups: dict[tuple[str, str, str], list[EdgeTraffic]] = {}
    for row in rows:
        job = getattr(row, end).partition(":")[0] + ":*"
        groups.setdefault((row.edge, job, getattr(row, other)), []).append(row)
    found = []
    for (_, job, _), same in groups.items():
        where = job if len({getattr(row, end) for row in same}) > 1 else getattr(same[0], end)
        found.append(replace(summed(same), **{end: where}))
    return found
