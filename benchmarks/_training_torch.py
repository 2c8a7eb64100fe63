"""A worker of `benchmarks.sync_steps` by PyTorch's DistributedDataParallel over gloo, in an environment with it."""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks._models import LEARNING_RATE, dense
from benchmarks._train import train


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "index", "workers", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{given.port}", rank=given.index, world_size=given.workers
    )
    model = dense(given.layers, given.width)
    x, y = map(torch.from_numpy, model.batch)
    layers = DistributedDataParallel(Layers([torch.from_numpy(value) for value in model.initial.values()]))
    optimizer = torch.optim.Adam(layers.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = ((layers(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    train(step, began)


class Layers(torch.nn.Module):
    """The layers of `_models.dense`."""

    def __init__(self, initial: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(initial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.relu(x @ weight)
        return x


if __name__ == "__main__":
    main()
