"""Draw one step of a trace written by `dflow trace`, as in docs/monitoring.md.

    dflow launch --ps 2 --workers 2 examples/digits.py --steps 6000
    dflow trace --coordinator HOST:PORT --steps 3 --out trace.json
    python -m benchmarks._trace_picture trace.json docs/images/monitoring-trace.png

Each task has a band for each kind of event; an arrow leads from the send of a value to its arrival. Needs matplotlib,
the `plots` extra.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = {"steps": "C7", "parts of steps": "C0", "Python": "C4", "XLA": "C2", "messages": "C1", "waits": "C3"}
#: Kinds of slices that are drawn pale.
PALE = ("messages", "waits")
_LEGEND = {
    "steps": "the worker's step",
    "parts of steps": "the task's part of it",
    "Python": "Python runs",
    "XLA": "XLA computes",
    "messages": "a value is on its way",
    "waits": "waits for a value",
}
Events = Sequence[Mapping[str, Any]]


def events_of(events: Events, step: str) -> Events:
    """Return the events and arrows of one step of a trace."""
    slices = [event for event in events if event["ph"] == "X" and event["args"].get("step") == step]
    began, ended = min(event["ts"] for event in slices), max(event["ts"] + event["dur"] for event in slices)
    tracks = {(event["pid"], event["tid"]) for event in slices if event["cat"] == "messages"}
    arrows = [
        event
        for event in events
        if event["ph"] in "sf" and (event["pid"], event["tid"]) in tracks and began <= event["ts"] <= ended
    ]
    both = {event["id"] for event in arrows if event["ph"] == "s"} & {
        event["id"] for event in arrows if event["ph"] == "f"
    }
    return [*slices, *(event for event in arrows if event["id"] in both)]


def _alpha(kind: str) -> float:
    return 0.25 if kind in PALE else 0.9


def draw(trace: Mapping[str, Any], file: Path) -> str:
    """Draw the first step of a trace into `file`; return the step's name."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    events: Events = trace["traceEvents"]
    tasks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    step = min((event for event in events if event.get("cat") == "steps"), key=lambda event: event["ts"])["name"]
    shown = events_of(events, step)
    slices = [event for event in shown if event["ph"] == "X"]
    zero = min(event["ts"] for event in slices)
    of_tasks = {pid: {event["cat"] for event in slices if event["pid"] == pid} for pid in tasks}
    bands = [(pid, kind) for pid in sorted(of_tasks, reverse=True) for kind in KINDS if kind in of_tasks[pid]]
    height = {band: len(bands) - number for number, band in enumerate(bands)}

    figure, axis = plt.subplots(figsize=(10, 0.34 * len(bands) + 1.7), layout="constrained")
    for event in slices:
        (at, wide), kind = ((event["ts"] - zero) / 1e3, max(event["dur"] / 1e3, 0.01)), event["cat"]
        place = height[event["pid"], kind]
        axis.barh(place, wide, left=at, height=0.7, color=KINDS[kind], alpha=_alpha(kind), linewidth=0)
    ends: dict[Any, dict[str, tuple[float, float]]] = {}
    for event in shown:
        if event["ph"] in "sf":
            place = (event["ts"] - zero) / 1e3, height[event["pid"], "messages"]
            ends.setdefault(event["id"], {})[event["ph"]] = place
    for end in ends.values():
        axis.annotate(
            "", end["f"], end["s"], arrowprops={"arrowstyle": "->", "lw": 0.5, "color": "black", "alpha": 0.6}
        )
    axis.set_yticks([height[band] for band in bands], [f"{tasks[pid]}  {kind}" for pid, kind in bands])
    for (above, _), (below, _), place in zip(bands, bands[1:], range(len(bands), 1, -1), strict=False):
        if above != below:
            axis.axhline(place - 0.5, color="black", linewidth=0.6)
    shown_kinds = [kind for kind in KINDS if any(kind == band for _, band in bands)]
    colours = [Patch(color=KINDS[kind], alpha=_alpha(kind), label=_LEGEND[kind]) for kind in shown_kinds]
    sent = Line2D([], [], color="black", marker=r"$\rightarrow$", linestyle="", markersize=12, label="a value is sent")
    figure.legend(handles=[*colours, sent], loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    axis.set_xlabel("ms")
    axis.set_title(step)
    axis.margins(x=0.01)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return str(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="what `dflow trace` wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    options = parser.parse_args()
    print(f"{options.picture}: {draw(json.loads(options.trace.read_text()), options.picture)}")


if __name__ == "__main__":
    main()
