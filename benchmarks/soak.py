"""Check that memory, descriptors and threads of every process of a cluster stay constant for 100,000 steps.

Two ps tasks and two workers, each a process. A step gathers rows, updates rows and a dense variable, and waits for the
other worker at a barrier made of queues. *growth* is measured from a tenth of the steps, when caches are full, to the
end.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks._launched import launched
from benchmarks._paired import options, publish

PS, WORKERS, LOOKS = 2, 2, 20


def main() -> None:
    given = options(__doc__, steps=100_000)
    found = looks(given.steps)
    begin, end = found[len(found) // 10]["tasks"], found[-1]["tasks"]
    rows = [
        {
            "process": name,
            "steps": found[-1]["steps"] * WORKERS,
            "MB": end[name]["kB"] / 1e3,
            "growth MB": (end[name]["kB"] - begin[name]["kB"]) / 1e3,
            "most MB": max(look["tasks"][name]["kB"] for look in found) / 1e3,
            "descriptors": end[name]["descriptors"],
            "more": end[name]["descriptors"] - begin[name]["descriptors"],
            "threads": end[name]["threads"],
            "more ": end[name]["threads"] - begin[name]["threads"],
        }
        for name in sorted(end)
    ]
    publish("soak", rows, as_json=given.json)


def looks(steps: int) -> list[dict[str, Any]]:
    """Run the steps on a cluster and return the samples of its processes."""
    words = ["--steps", str(steps // WORKERS), "--looks", str(LOOKS), "--workers", str(WORKERS)]
    ended = launched("_soak_worker.py", words, ps=PS, workers=WORKERS, timeout_s=7200)
    start = "[worker:0] looks "
    lines = [line for line in ended.stdout.splitlines() if line.startswith(start)]
    if not lines:
        raise SystemExit(f"the cluster failed:\n{ended.stdout}{ended.stderr}")
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix(start))
    return found


if __name__ == "__main__":
    main()
