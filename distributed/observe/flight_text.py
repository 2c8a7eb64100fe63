"""A task's newest events as text for people: what is in progress, since when, and what came before.

A pure function of events and times. Texts from other tasks are escaped, so that they cannot imitate lines of this
text.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflow.distributed.observe.spans import spans
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE
from dflow.lowering.steps.recorder import ITEM_BEGAN, PART_BEGAN, Event
from dflow.tracing.devices.task_name import short_task_name

#: At most this many steps in progress are listed, and this many items of each.
MOST_STEPS, MOST_ITEMS = 20, 20


def flight_text(events: Sequence[Event], now_ns: int) -> str:
    """List what is in progress and what happened, oldest first; times are in s before `now_ns`."""
    lines = ["under way:", *(_under_way(events, now_ns) or ["  nothing"]), "", "events:"]
    lines += [f"{_age(event.at_ns, now_ns)}  {_said(event)}" for event in events]
    return "\n".join(lines) + "\n"


def _under_way(events: Sequence[Event], now_ns: int) -> list[str]:
    found = [span.began for span in spans(events) if span.ended is None]
    parts = [began for began in found if began.what == PART_BEGAN]
    lines = []
    for part in parts[:MOST_STEPS]:
        items = [began for began in found if began.what == ITEM_BEGAN and _step(began) == _step(part)]
        lines.append(f"  {_step(part)}, for {_seconds(part.at_ns, now_ns)}")
        lines += [f"    {_item(item)}, for {_seconds(item.at_ns, now_ns)}" for item in items[:MOST_ITEMS]]
        lines += [f"    and {len(items) - MOST_ITEMS} more"] if len(items) > MOST_ITEMS else []
    return lines + ([f"  and {len(parts) - MOST_STEPS} more steps"] if len(parts) > MOST_STEPS else [])


def _said(event: Event) -> str:
    step = _step(event)
    match event.what:
        case "step began" | "step ended" | "part began" | "part ended":
            return f"{step}: {event.what.replace('step ', '').replace('part', 'its part here')}{_after(event.text)}"
        case "item began" | "item ended" | "item failed":
            return f"{step}: {event.what.removeprefix('item ')} {_item(event)}{_after(event.text)}"
        case "sent":
            took = f", {(event.at_ns - event.began_ns) / 1e6:.3f} ms" if event.began_ns else ""
            return f"{step}: sent {_plain(event.name)} to {_task(event.peer)}, {event.size_bytes} B{took}"
        case "received":
            return f"{step}: received {_plain(event.name)} from {_task(event.peer)}, {event.size_bytes} B"
        case "wait expired":
            return f"{step}: gave up waiting for {_plain(event.name)} from {_task(event.peer)}"
    who = f" {_task(event.peer)}" if event.peer else ""
    return f"{event.what}{who}{_after(event.text)}"


def _step(event: Event) -> str:
    return f"step {event.step % STEPS_OF_A_LIFE} of {_task(event.origin)}" if event.origin else ""


def _item(event: Event) -> str:
    what = {"Recv": f"wait for {_task(event.peer)}", "Send": f"send to {_task(event.peer)}"}.get(event.kind, event.kind)
    line = f" at {_plain(event.line)}" if event.line else ""
    return f"{what}: {_plain(event.name) or f'item {event.number}'}{line}"


def _task(name: str) -> str:
    return _plain(short_task_name(name))


def _after(text: str) -> str:
    return f": {_plain(text)}" if text else ""


def _plain(text: str) -> str:
    """Escape a text that is not printable, so that it stays on one line."""
    return text.encode("unicode_escape").decode() if not text.isprintable() else text


def _age(at_ns: int, now_ns: int) -> str:
    return f"{(at_ns - now_ns) / 1e9:12.6f}"


def _seconds(since_ns: int, now_ns: int) -> str:
    return f"{(now_ns - since_ns) / 1e9:.3f} s"
