"""The plots of `benchmarks.scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def draw(null: Rows, training: Rows, backups: Rows, load: Rows, folder: Path) -> None:
    """Write a PNG for each argument into `folder`; raise ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for number, kind in enumerate(dict.fromkeys(row["kind"] for row in null)):
        rows = [row for row in null if row["kind"] == kind]
        workers = [row["workers"] for row in rows]
        axis.plot(workers, [row["median ms"] for row in rows], f"C{number}-", label=f"{kind}, simulated")
        axis.fill_between(
            workers, [row["p10"] for row in rows], [row["p90"] for row in rows], color=f"C{number}", alpha=0.2
        )
        for row in (row for row in rows if row["paper ms"] != ""):
            is_held_out = bool(row["held out"])
            style = {"marker": "*" if is_held_out else "o", "markersize": 13 if is_held_out else 7}
            axis.plot(
                row["workers"], row["paper ms"], color=f"C{number}", linestyle="", markeredgecolor="black", **style
            )
    axis.plot([], [], "ko", label="paper, fitted")
    axis.plot([], [], "k*", markersize=13, label="paper, held out")
    axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="step, ms", title="Null step, 16 ps tasks")
    axis.set_ylim(1, 2e5)
    axis.legend(fontsize=8, loc="upper left", ncol=2)
    axis.grid(alpha=0.3, which="both")
    save(figure, "scaling-null-step")

    figure, axis = plt.subplots(figsize=(7, 4.5))
    workers = [row["workers"] for row in training]
    axis.plot(workers, [row["async images/s"] for row in training], "C0-", label="asynchronous, simulated")
    axis.plot(workers, [row["sync images/s"] for row in training], "C1-", label="synchronous, simulated")
    axis.plot(200, 2300, "ko", label="paper at 200 workers, fitted")
    axis.set(xlabel="workers", ylabel="images/s", title="Inception-v3, 17 ps tasks", ylim=(0, None), xlim=(0, None))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    save(figure, "scaling-training")

    figure, axis = plt.subplots(figsize=(7, 4.5))
    places = [row["backups"] for row in backups]
    axis.plot(places, [row["step s"] for row in backups], "C0-", marker=".", label="step, simulated (left)")
    for style, name in (("C2:", "log-normal"), ("C3:", "stragglers")):
        steps_s = [row[f"{name}: step s"] for row in backups]
        axis.plot(places, steps_s, style, marker=".", label=f"step, fitted {name} (left)")
    known = [(row["backups"], row["paper s"]) for row in backups if row["paper s"] != ""]
    axis.plot(*zip(*known, strict=True), "ko", label="step, paper, fitted (left)")
    axis.set(xlabel="backup workers", ylabel="step, s", title="Backup workers, 50 gradients a step")
    other = axis.twinx()
    other.plot(places, [row["normalised"] for row in backups], "C1--", marker=".", label="normalised speedup (right)")
    other.set_ylabel("speedup x 50 / (50 + backups)")
    lines = [line for each in (axis, other) for line in each.get_legend_handles_labels()[0]]
    axis.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="center right")
    axis.grid(alpha=0.3)
    save(figure, "scaling-backups")

    figure, axis = plt.subplots(figsize=(7, 4.5))
    tasks = [row["tasks"] for row in load]
    axis.plot(tasks, [row["part of a core"] for row in load], "C0-", marker=".", label="of each second, cores")
    axis.plot(tasks, [row["a join, ms"] / 1e3 for row in load], "C1-", marker=".", label="of each join, s of a core")
    axis.set(xscale="log", yscale="log", xlabel="tasks", title="The coordinator's processor time, measured")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, which="both")
    save(figure, "scaling-coordinator")
