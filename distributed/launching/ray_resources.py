"""What a task asks of a Ray cluster, as text and as values. Needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RayResources:
    """What an actor asks of its node: CPUs and GPUs, in parts if need be, and resources by names of the user's own."""

    cpus: float = 1.0
    gpus: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> RayResources:
        """`CPU=1,GPU=0.5,NAME=2`; raises ValueError for another text."""
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
        """All of them by Ray's names."""
        return {"CPU": self.cpus, "GPU": self.gpus, **self.others}


def amounts_text(resources: Mapping[str, float]) -> str:
    """Amounts for a person; memory and what stands for one node alone are left out."""
    names = [name for name in sorted(resources) if ":" not in name and "memory" not in name]
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"
