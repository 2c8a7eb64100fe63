"""Run the exports of examples in a process without their code: `run_exports.py DIRECTORY`.

The directory has a folder for each example, with the export `made` and the arguments of each step, `given.npz`. All
results, and the state after all steps, are written to `got.npz`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflow

#: Number of calls of each function.
STEPS = 10


def run(functions: Any, variables: Any, order: list[str], given: Any) -> dict[str, np.ndarray]:
    """Return the leaves of each step's result, and then of the variables. A step calls each function once, in order."""
    got: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        for name in order:
            leaves = [given[key] for key in sorted(given) if key.startswith(f"{step}/{name}/")]
            tree = json.loads(str(given[f"tree/{name}"]))
            args = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)
            for index, leaf in enumerate(jax.tree.leaves(functions(name)(*args))):
                got[f"{step}/{name}/{index}"] = np.asarray(leaf)
    return got | {f"state/{name}": np.asarray(variable) for name, variable in variables.items()}


def main(place: Path) -> None:
    for folder in sorted(place.iterdir()):
        there = dflow.load(folder / "made", prefix=f"{folder.name}/")
        given = dict(np.load(folder / "given.npz"))
        got = run(there.__getitem__, there.variables, list(there.signatures), given)
        np.savez(folder / "got.npz", **got)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
