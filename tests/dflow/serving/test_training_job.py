"""A server that looks rows up at the tasks of a running training job: it sees them change, and training goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.serving.rows.training_job import TrainingJob
from dflow.serving.served_version import ServedVersion, ServingSettings
from dflow.testing import memory_cluster
from tests.dflow.serving.inference_client import call, infer, json_input
from tests.dflow.serving.small_exports import served
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.waiting import until

SERVER = "/job:server/task:0"
NAMES, NUMBERS = ["ann", "bob", "eve", "new"], np.array([0, 7, 7, 39], np.int32)


class Model:
    """Two tables on the tasks of `worker`, a step that changes rows of both and counts, and a function to serve."""

    def __init__(self, worker: Cluster, name: str, vocabulary: dflow.Vocabulary, rows: int = 40) -> None:
        with worker.parameter_servers():
            self.users = dflow.Embedding(64, 2, name=f"{name}/users", vocabulary=vocabulary)
            self.items = dflow.Embedding(rows, 2, name=f"{name}/items", by="modulo")
            self.count = dflow.Variable(0, name=f"{name}/count", trainable=False)
            self.optimizer = dflow.Optimizer(optax.sgd(-0.125), [self.users, self.items], name=f"{name}/sgd")
        users, items, layer = self.users, self.items, jnp.array([1.0, 2.0])

        @dflow.jit
        def step(names: Any) -> Any:
            self.count.assign_add(1)
            found = users.find(names)

            def loss() -> Any:
                return users(found).sum() + items(jnp.arange(40)).sum()

            value, gradients = dflow.value_and_grad(loss, [users, items])()
            self.optimizer.apply(gradients, found=found)
            return value

        def serve(names: Any, ids: Any) -> Any:
            return (users(names) + items(ids)) @ layer

        self.step, self.serve = step, serve

    def export(self, path: Path) -> Path:
        specs = dflow.spec("b", np.str_), dflow.spec("b", jnp.int32)
        return dflow.export(self.serve, *specs, platforms=["cpu"]).save(path)

    def expected(self) -> Any:
        return np.asarray(dflow.jit(self.serve)(NAMES, NUMBERS))


def request(names: Any = NAMES, ids: Any = NUMBERS) -> bytes:
    strings = {"name": "names", "datatype": "BYTES", "shape": [len(names)], "data": [*names]}
    return json.dumps({"inputs": [strings, json_input("ids", ids)]}).encode()


def answer(url: str) -> Any:
    """Return the outputs, or the text of a refusal for a task that is away."""
    status, body, _ = infer(url, "m", request())
    assert status in (200, 503), body
    return np.array(body["outputs"][0]["data"], np.float32) if status == 200 else body["error"]


@contextmanager
def server_of(address: str, network: MemoryNetwork, path: Path, **settings: Any) -> Iterator[str]:
    with (
        TrainingJob(address, network, name=SERVER) as job,
        served(path, ServingSettings(tables=job, **settings)) as one,
    ):
        yield one.url


@pytest.mark.once
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", [dflow.distributed.Async, dflow.distributed.Sync])
def test_rows_are_served_as_they_change_and_no_step_is_lost_or_waits(strategy: Any, tmp_path: Path) -> None:
    name, steps = strategy.__name__, 60
    with closing(Tasks(tmp_path / "snapshots", 0.25, workers=2)) as tasks, ThreadPoolExecutor(2) as threads:
        models = [*threads.map(lambda worker: Model(worker, name, dflow.Vocabulary(bucket=8)), tasks.workers)]
        models[0].step(NAMES[:-1])
        path = models[0].export(tmp_path / "m")

        def train(worker: Cluster, model: Model) -> int:
            run = strategy(worker).run(model.step, repeat((NAMES,)), steps=steps, name="run")
            return sum(1 for _ in run)

        with server_of(tasks.coordinator.address, tasks.network, path, cache_rows=100, max_age_s=0.05) as url:
            first = answer(url)
            np.testing.assert_allclose(first, models[0].expected(), rtol=1e-6)
            done: list[Future[int]] = [*map(threads.submit, repeat(train), tasks.workers, models)]
            until(lambda: not isinstance(now := answer(url), str) and (now > first + 1).all())  # the new name too
            tasks.await_snapshot(1)
            tasks.start_again(1)
            until(lambda: isinstance(answer(url), str) or done[0].done())
            until(lambda: not isinstance(answer(url), str))
            assert not [info.task for info in tasks.worker.coordinator.session.roster.tasks if "server" in info.task]
        # A server that ends within the run, with the connections to the tasks alone, as one that is killed.
        assert sum(future.result() for future in done) >= steps
        workers = 1 if strategy is dflow.distributed.Async else 2  # each counts in each round
        assert int(models[0].count.read()) == workers * steps + 1
        with server_of(tasks.coordinator.address, tasks.network, path) as url:
            np.testing.assert_allclose(answer(url), models[0].expected(), rtol=1e-6)
            metrics = call(url, "/metrics")[1].decode()
            assert f'dflow_serve_table_misses_total{{model="m",table="{name}/users"}}' in metrics
            counts = models[0].users.counts()
            infer(url, "m", request(["nobody"] * 4))
            assert models[0].users.counts() == counts


def test_after_the_end_of_a_job_rows_of_the_cache_are_served(tmp_path: Path) -> None:
    with memory_cluster(ps=2) as cluster, closing(cluster.worker()) as worker:
        address = cluster.coordinator.address
        path = Model(worker, "one", dflow.Vocabulary(bucket=8)).export(tmp_path / "m")
        with server_of(address, cluster.network, path, cache_rows=9) as url:
            assert len(answer(url)) == 4
            held = answer(url)
            worker.close()
            for task in cluster.tasks.values():
                task.close()
            until(
                lambda: "ps:0 has left: stopped; the job has ended" in infer(url, "m", request(["x"] * 4))[1]["error"]
            )
            np.testing.assert_array_equal(answer(url), held)


def test_tables_of_another_program_are_refused_with_both(tmp_path: Path) -> None:
    kept = dflow.Vocabulary(bucket=8)
    with memory_cluster(ps=2) as cluster, closing(cluster.worker()) as worker:
        path = Model(worker, "two", kept).export(tmp_path / "m")
    for rows, vocabulary, text in (
        (50, kept, r"table 'two/items': expected 'two/items/0' of float32\[20, 2\], as exported, got float32\[25, 2\]"),
        (40, dflow.Vocabulary(bucket=8, admit_after=2), r"admit_after=1, .* as exported, got .*admit_after=2"),
    ):
        with memory_cluster(ps=2) as cluster, closing(cluster.worker()) as worker:
            other = Model(worker, "two", vocabulary, rows)
            other.users.read()
            with (
                TrainingJob(cluster.coordinator.address, cluster.network, name=SERVER) as job,
                pytest.raises(dflow.ExportError, match=text),
            ):
                ServedVersion("m", 1, path, ServingSettings(tables=job), lambda *_: None)
