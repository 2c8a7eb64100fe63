"""The step of `benchmarks.embedding` by PyTorch, in an environment with it; prints times as JSON.

`torch.nn.functional.embedding(sparse=True)` and the optimizers that accept its gradients: SGD, Adagrad, SparseAdam.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

COLUMNS = 64
LOOKUPS = 1024
WARM_UP = 10
RULES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "lazy_adam": torch.optim.SparseAdam}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=RULES, required=True)
    parser.add_argument("--millions", type=int, nargs="+", required=True)
    for name in ("steps", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.sparse.check_sparse_tensor_invariants.disable()
    draw = np.random.default_rng(0)
    steps = {millions: make_step(given.rule, millions, draw) for millions in given.millions}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times = {millions: [] for millions in given.millions}
    for _ in range(given.rounds):
        for millions, step in steps.items():
            times[millions].append([step() for _ in range(given.steps)])
    print("measured " + json.dumps({"times": times}), flush=True)


def make_step(rule: str, millions: int, draw: np.random.Generator) -> Callable[[], float]:
    """Return a training step over two tables, which returns its time in s."""
    count = millions * 1_000_000 // COLUMNS // 2
    tables = [torch.full((count, COLUMNS), 0.1, requires_grad=True) for _ in range(2)]
    optimizer = RULES[rule](tables, lr=0.01)

    def step() -> float:
        ids = [torch.from_numpy(draw.integers(count, size=LOOKUPS)) for _ in range(2)]
        wanted = torch.from_numpy(draw.normal(size=LOOKUPS).astype(np.float32))
        started = time.perf_counter()
        optimizer.zero_grad()
        rows = [torch.nn.functional.embedding(i, table, sparse=True) for i, table in zip(ids, tables, strict=True)]
        loss = (((rows[0] * rows[1]).sum(1) - wanted) ** 2).mean()
        loss.backward()
        optimizer.step()
        loss.item()
        return time.perf_counter() - started

    return step


if __name__ == "__main__":
    main()
