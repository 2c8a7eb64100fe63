"""A process of `benchmarks.peers_training` by PyTorch, in an environment with it: the click-through model of `_clicks`.

DistributedDataParallel over gloo. Every process has the whole table; its gradients are sparse, and so are what the
processes exchange and Adagrad's update.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks import _clicks


def main() -> None:
    began, given = time.perf_counter(), joined()
    torch.sparse.check_sparse_tensor_invariants.disable()
    model = DistributedDataParallel(Model(given.rows))
    train(given, began, model, adagrad(model.parameters()))


def joined() -> argparse.Namespace:
    """Join the other processes; return the options."""
    options = _clicks.parser()
    for name in ("index", "workers", "port"):
        options.add_argument(f"--{name}", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{given.port}", rank=given.index, world_size=given.workers
    )
    return given


def train(
    given: argparse.Namespace,
    began: float,
    odds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Train by the odds of a click that `odds` gives for ids and numbers."""
    batches = [tuple(map(torch.from_numpy, batch)) for batch in _clicks.batches(given, given.index, given.workers)]

    def losses() -> Iterator[torch.Tensor]:
        for ids, numbers, clicks in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(odds(ids, numbers), clicks)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    _clicks.train(losses(), began)


class Model(torch.nn.Module):
    """Returns the log odds of a click."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(
            torch.from_numpy(_clicks.initial_table(rows)), freeze=False, sparse=True
        )
        self.layers = layers()

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids).flatten(1)
        odds: torch.Tensor = self.layers(torch.cat([rows, numbers], 1))[:, 0]
        return odds


def layers() -> torch.nn.Sequential:
    """The layers, with their initial values."""
    made: list[torch.nn.Module] = []
    for kernel, bias in _clicks.initial_layers():
        layer = torch.nn.Linear(*kernel.shape)
        layer.weight.data = torch.from_numpy(kernel.T.copy())
        layer.bias.data = torch.from_numpy(bias)
        made += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*made[:-1])


def adagrad(parameters: Iterable[torch.Tensor]) -> torch.optim.Adagrad:
    """The rule."""
    return torch.optim.Adagrad(
        parameters, lr=_clicks.LEARNING_RATE, initial_accumulator_value=_clicks.ACCUMULATOR, eps=_clicks.EPSILON
    )


if __name__ == "__main__":
    main()
