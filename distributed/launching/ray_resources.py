"""The resources that a task requests from a Ray cluster, as text and as values. This does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RayResources:
    """The resources that an actor requests: CPUs and GPUs, also fractions, and resources of the user's own names."""

    cpus: float = 1.0
    gpus: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> RayResources:
        """Parse text such as `CPU=1,GPU=0.5,NAME=2`; raises ValueError for malformed text."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, equals, amount = part.partition("=")
            try:
                found[name.strip()] = float(amount)
            except ValueError:
                equals = ""
            if not (name.strip() and equals and found[name.strip()] >= 0):
                raise ValueError(f"{text!r} states no resources; write them as CPU=1,GPU=0.5 with names of Ray's")
        return RayResources(found.pop("CPU", 1.0), found.pop("GPU", 0.0), found)

    @property
    def amounts(self) -> dict[str, float]:
        """All amounts by Ray's names."""
        return {"CPU": self.cpus, "GPU": self.gpus, **self.others}


def amounts_text(resources: Mapping[str, float]) -> str:
    """Format amounts for a person, without memory and resources that name a single node."""
    names = [name for name in sorted(resources) if ":" not in name and "memory" not in name]
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"
