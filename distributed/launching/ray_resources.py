"""The resources that a task requests from a Ray cluster, by Ray's names. This does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping


def ray_resources(text: str) -> dict[str, float]:
    """Parse text such as `CPU=1,GPU=0.5,NAME=2`, with 1 CPU by default; raises ValueError for malformed text."""
    found = {"CPU": 1.0}
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            equals = ""
        if not (name.strip() and equals and found[name.strip()] >= 0):
            raise ValueError(f"{text!r} states no resources; write them as CPU=1,GPU=0.5 with names of Ray's")
    return found


def amounts_text(resources: Mapping[str, float]) -> str:
    """Format amounts for a person, without memory and resources that name a single node."""
    names = [name for name in sorted(resources) if ":" not in name and "memory" not in name]
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"
