"""The log of a step's traces under a strategy: a step is compiled once, and each trace has its own, true reason."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import optax
import pytest

import dflow
from dflow.calls.trace_log import _LOOK
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import memory_cluster
from tests.distributed.training.sync_programs import SOON, together

# The workers are threads of this process.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")
#: Whether the trace is a look of the strategy, and its reason.
LOOK, RUN = (True, (_LOOK,)), (False, ("first trace",))


def traces(cluster: Cluster, strategy: str, backup_workers: int | None) -> list[list[tuple[bool, Any]]]:
    """Run a step that calls a function; return the traces of both."""
    given = {} if backup_workers is None else {"backup_workers": backup_workers}
    chosen = getattr(dflow.distributed, "Async" if strategy == "Async" else "Sync")(cluster, **given)
    with chosen.variables():
        table = dflow.Embedding(8, 2, name="table")
        optimizer = dflow.Optimizer(optax.sgd(0.1), [table], name="opt")

    @dflow.jit
    def inner(ids: Any) -> Any:
        return ids % 8

    @dflow.jit
    def step(ids: Any) -> Any:
        places = inner(ids)
        loss, gradients = dflow.value_and_grad(lambda: table(places).sum(), optimizer.variables)()
        optimizer.apply(gradients)
        return {"loss": loss}

    def batch(number: int) -> Any:
        return np.arange(4, dtype=np.int32) + number

    if strategy == "Trainer":
        dflow.Trainer(step, chosen).run(batch, steps=4)
    else:
        list(chosen.run(step, batch, steps=4, name="run"))
    return [[(one.is_look, one.changes) for one in function.trace_log()] for function in (step, inner)]


@pytest.mark.parametrize(("strategy", "backup_workers"), [("Async", None), ("Sync", 1), ("Trainer", None)])
def test_a_step_has_one_trace_that_runs(strategy: str, backup_workers: int | None) -> None:
    expected = [RUN] if strategy == "Async" else [LOOK, RUN]
    with (
        memory_cluster(ps=1, workers=2) as memory,
        closing(memory.worker(0, SOON)) as one,
        closing(memory.worker(1, SOON)) as two,
    ):
        found = together([one, two], lambda index, cluster: traces(cluster, strategy, backup_workers))
    # A worker that comes when the others have done all steps traces nothing, or only looks.
    assert all(log == expected[: len(log)] for logs in found for log in logs)
    assert [expected, expected] in found
