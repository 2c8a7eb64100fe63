"""Description of a task for an error: its last heartbeat and what it works on, or why it is absent."""

from __future__ import annotations

from dflow.distributed.wire.messages.status import Health
from dflow.tracing.devices.task_name import short_task_name


def describe_task(task: str, answer: Health) -> str:
    """Describe a task, such as "ps:0 (last heard 0.3 s ago, 12 steps ended, now idle)", or "ps:0 (has not joined)"."""
    name, health = short_task_name(task), answer.health
    if health is None:
        return f"{name} ({answer.absence.removeprefix(name).strip() or 'just joined'})"
    stalled_s = health.stalled_since_s
    stall = f", which has ended no step for {answer.now_s - stalled_s:.1f} s" if stalled_s is not None else ""
    heard = f"last heard {answer.now_s - health.heard_at_s:.1f} s ago"
    doing = f"at: {health.doing}" if health.doing else "idle"
    return f"{name} ({heard}, {health.steps} steps ended, now {doing}{stall})"
