"""Uses of state by two worker processes that compute together: `AllReduce`, also fully sharded, and `Hybrid`.

One launched job runs all chosen kinds under each strategy, one after another, and writes what came of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import dflow
from tests.composition.kind import NUMBERS, Batch, Kind, Outcome, Pair, whole
from tests.composition.kinds import KINDS, Shards
from tests.composition.kinds_of_training import Table

ROOT = Path(__file__).parents[2]
#: Names of the kinds that a job runs by use, as JSON.
CHOSEN = "COMPOSITION_KINDS"


def all_reduced(pair: Pair, cluster: Any, **options: Any) -> Outcome:
    """Do three steps of two workers' batches together: equal to one process with both batches in one."""
    strategy = dflow.distributed.AllReduce(cluster, **options)
    with strategy.variables():
        held = pair.make()
    batches = pair.batches([2 * number + cluster.index for number in NUMBERS])
    results = list(strategy.run(dflow.jit(held.step), batches, steps=len(NUMBERS), name=f"{pair.use} of {pair.kind}"))
    reference = pair.kind.reference()
    expected = [reference.step(pair.joined((2 * number, 2 * number + 1))) for number in NUMBERS]
    return [("results", np.array(results), np.array(expected)), ("content", held.state(), reference.state())]


def hybrid(pair: Pair, cluster: Any) -> Outcome:
    """Do three steps with tables on tasks and the rest in the workers, beside a dense weight and a table.

    The strategy averages what steps write to floating-point variables of the workers; other variables of a worker have
    its own writes.
    """
    strategy = dflow.distributed.Hybrid(cluster)
    is_table = isinstance(pair.kind, Table | Shards)
    with cluster.parameter_servers():
        held = pair.make() if is_table else None
        table = dflow.Variable(lambda: np.ones(2, np.float32), name=f"{pair.prefix()}/companion table")
        of_table = dflow.Optimizer(optax.sgd(0.5), [table], name=f"{pair.prefix()}/of table")
    with strategy.variables():
        held = held or pair.make()
        dense = dflow.Variable(lambda: np.ones(2, np.float32), name=f"{pair.prefix()}/dense")
        of_dense = dflow.Optimizer(optax.sgd(0.5), [dense], name=f"{pair.prefix()}/of dense")

    @dflow.jit
    def step(given: Batch) -> Any:
        result = held.step(given)
        by_dense, by_table = dflow.grad(lambda: (dense + table).sum() * given["x"].mean(), [[dense], [table]])()
        of_dense.apply(by_dense)
        of_table.apply(by_table)
        return result

    numbers = [2 * number + cluster.index for number in NUMBERS]
    done = list(strategy.run(step, pair.batches(numbers), steps=len(NUMBERS), name=f"{pair.use} of {pair.kind}"))
    cluster.barrier(f"{pair.use} of {pair.kind} is done")
    content, means = written_in(pair, cluster.index, is_table)
    weights = np.full(2, 1 - 0.5 * means)
    return [
        ("steps", len(done), len(NUMBERS)),
        ("content", held.state(), content),
        ("dense", whole(dense), weights),
        ("table", whole(table), weights),
    ]


def written_in(pair: Pair, index: int, is_table: bool) -> tuple[Any, float]:
    """Return the content after the steps of both workers, as worker `index` sees it, and the sum of the means of x."""
    own, other, means = pair.kind.reference(), pair.kind.reference(), 0.0
    is_averaged = jnp.issubdtype(getattr(pair.kind, "dtype", jnp.int32), jnp.inexact)
    for number in NUMBERS:
        parts = [pair.batches((2 * number + part,))[0] for part in (index, 1 - index)]
        own.write(parts[0])
        (own if is_table else other).write(parts[1])
        if is_averaged:
            own.value = other.value = ((own.value + other.value) / 2).astype(own.value.dtype)
        both = pair.joined((2 * number, 2 * number + 1))
        own.train(both)
        means += both["x"].mean()
    return own.state(), means


RUNS: dict[str, Callable[[Pair, Any], Outcome]] = {
    "AllReduce": all_reduced,
    "AllReduce(fully_sharded=True)": lambda pair, cluster: all_reduced(pair, cluster, fully_sharded=True),
    "Hybrid": hybrid,
}


def main() -> None:
    """Run the chosen kinds in a worker of a launched job, and write what came of them."""
    cluster = dflow.connect(collectives=True)
    from tests.composition.refusals import judged  # which imports this module, and makes arrays

    found: dict[str, dict[str, dict[str, str]]] = {}
    path = Path(f"worker-{cluster.index}.json")
    for use, kinds in json.loads(os.environ[CHOSEN]).items():
        of_use = found.setdefault(use, {})
        for name in kinds:
            print("composition:", use, name, flush=True)
            try:
                of_use[name] = {"outcome": judged(RUNS[use], Pair(KINDS[name], use), cluster)}
            except Exception as error:
                of_use[name] = {"error": f"{type(error).__name__}: {error}"}
            path.write_text(json.dumps(found))
    cluster.close()


def job(chosen: Mapping[str, Sequence[str]]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a room where a launched job has run each use with its chosen kinds."""

    @contextlib.contextmanager
    def room() -> Iterator[dict[str, Any]]:
        from tests.distributed.processes import Spawned

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "program.py").write_text("from tests.composition.uses_in_processes import main\nmain()\n")
            words = ("-m", "dflow", "launch", "--ps", "2", "--workers", "2", "program.py")
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            options = {"PYTHONPATH": path, CHOSEN: json.dumps(chosen), "KERAS_BACKEND": "jax"}
            with Spawned(*words, cwd=Path(folder), **options) as launched:
                _, output = launched.finish()
            files = [Path(folder) / f"worker-{index}.json" for index in (0, 1)]
            yield {"output": output, "found": [json.loads(file.read_text()) if file.exists() else {} for file in files]}

    return room


def found_of(use: str, kind: Kind, room: dict[str, Any]) -> str:
    """Return what both workers of the job found of a pair. Raises AssertionError if one failed, or they differ."""
    missing = {"error": "the job ended before"}
    first, second = (one.get(use, {}).get(kind.name, missing) for one in room["found"])
    assert first == second, f"worker 0 found {first}, worker 1 {second}"
    assert "outcome" in first, first["error"] + ("" if room["found"][0] else room["output"][-4000:])
    outcome: str = first["outcome"]
    return outcome
