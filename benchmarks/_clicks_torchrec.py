"""A process of `benchmarks.peers_training` by TorchRec, in an environment with it: the model of `_clicks`.

The rows of the table are divided over the processes, and only rows and their gradients travel, by gloo. TorchRec's
fused Adagrad begins at 0, so `EPSILON` stands for the others' initial value. Deduplication of ids (`use_index_dedup`)
is for GPUs alone.
"""

from __future__ import annotations

import os
import time

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import _clicks
from benchmarks._clicks_torch import adagrad, joined, layers, train

#: Nearly the same denominators as with `_clicks.ACCUMULATOR`: sqrt(sum) + EPSILON, not sqrt(sum + ACCUMULATOR).
EPSILON = _clicks.ACCUMULATOR**0.5


def main() -> None:
    began, given = time.perf_counter(), joined()
    os.environ |= {"LOCAL_RANK": str(given.index), "LOCAL_WORLD_SIZE": str(given.workers)}
    model = sharded(Model(given.rows), given.workers)
    optimizer = adagrad([parameter for name, parameter in model.named_parameters() if "layers" in name])
    lengths = torch.full((given.batch,), _clicks.FIELDS, dtype=torch.int32)

    def odds(ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(KeyedJaggedTensor(["ids"], ids.reshape(-1).long(), lengths=lengths), numbers)
        return found

    train(given, began, odds, optimizer)


class Model(torch.nn.Module):
    """Returns the log odds of a click."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        table = EmbeddingConfig(name="table", num_embeddings=rows, embedding_dim=_clicks.COLUMNS, feature_names=["ids"])
        self.table = EmbeddingCollection(tables=[table], device=torch.device("cpu"))
        with torch.no_grad():
            self.table.embeddings["table"].weight.copy_(torch.from_numpy(_clicks.initial_table(rows)))
        self.layers = layers()

    def forward(self, ids: KeyedJaggedTensor, numbers: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)["ids"].values().view(len(numbers), -1)
        odds: torch.Tensor = self.layers(torch.cat([rows, numbers], 1))[:, 0]
        return odds


def sharded(model: Model, processes: int) -> DistributedModelParallel:
    """Divide the table's rows over the processes, with Adagrad in its backward pass."""
    rule = {"lr": _clicks.LEARNING_RATE, "eps": EPSILON}
    apply_optimizer_in_backward(torch.optim.Adagrad, model.table.parameters(), rule)
    sharder = EmbeddingCollectionSharder()
    by_rows = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        Topology(world_size=processes, compute_device="cpu"), constraints={"table": by_rows}
    )
    plan = planner.collective_plan(model, [sharder], torch.distributed.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


if __name__ == "__main__":
    main()
