"""Exports whose tables are at tasks: the rows that a call looks up come from there, and answers stay the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task_role import start_task
from dflow.exporting.task_tables import forget as free
from dflow.lowering.programs import lookup_programs
from dflow.lowering.programs.lookup_programs import LookupsLeftOut
from dflow.serving import model_server, served_version
from dflow.serving.rows.row_cache import RowCache
from dflow.serving.served_version import ServingSettings
from dflow.testing import MemoryCluster, memory_cluster
from tests.dflow.serving.inference_client import call, infer, json_input
from tests.dflow.serving.small_exports import served
from tests.effort import examples

ROWS, DIM = 4000, 8
#: Of the vocabulary: those with a row, and one without.
NAMES = ["ann", "bob", "eve", "zoe"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[MemoryCluster, Cluster]]:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        yield cluster, worker


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a function of strings and of ragged bags of numbers, with a dense layer."""
    items = dflow.Embedding(ROWS, DIM, name="items", shards=2)
    users = dflow.Embedding(64, DIM, name="users", shards=2, vocabulary=dflow.Vocabulary(bucket=8))
    layer = dflow.Variable(jnp.arange(DIM, dtype=jnp.float32), name="layer")
    optimizer = dflow.Optimizer(optax.sgd(0.1), [users], name="sgd")

    @dflow.jit
    def step(names: Any) -> None:
        found = users.find(names)
        optimizer.apply(dflow.grad(lambda: jnp.sum(users(found) ** 2), [users])(), found=found)

    step(NAMES[:-1])

    def serve(names: Any, ids: Any, bags: Any) -> Any:
        return (users(names) * items.bag(ids, segments=bags, bags=names.shape[0])) @ layer

    specs = dflow.spec("b", np.str_), dflow.spec("n", jnp.int32), dflow.spec("n", jnp.int32)
    folder = tmp_path_factory.mktemp("row_lookups") / "m"
    return dflow.export(serve, *specs, platforms=["cpu"]).save(folder)


ARGUMENTS = NAMES, np.array([7, 3999, 7, 0], np.int32), np.array([0, 3, 3, 1], np.int32)
EMPTY: Any = np.zeros(0, np.str_), np.zeros(0, np.int32), np.zeros(0, np.int32)
#: Ids of one name.
MANY: Any = NAMES[:1], np.arange(100_000, dtype=np.int32) % ROWS, np.zeros(100_000, np.int32)


def sent_bytes(cluster: MemoryCluster) -> int:
    """Return the bytes of values that the tasks have sent."""
    return sum(edge.size_bytes for task in cluster.tasks.values() for edge in task.server.traffic())


def test_only_rows_of_tables_that_are_at_tasks_travel(path: Path, cluster: tuple[MemoryCluster, Cluster]) -> None:
    here = dflow.load(path, prefix="here/")
    with cluster[1].parameter_servers():
        there = dflow.load(path, prefix="there/")
    before = sent_bytes(cluster[0])
    for arguments in (ARGUMENTS, EMPTY):
        np.testing.assert_array_equal(there(*arguments), here(*arguments))
    assert 0 < sent_bytes(cluster[0]) - before < ROWS * DIM
    with pytest.raises(dflow.InputError, match=r"table 'items': expected ids from 0 to 3999, got 4000"):
        there(NAMES, ARGUMENTS[1] + 1, ARGUMENTS[2])
    with pytest.raises(dflow.ExportError, match="was exported with vjp_order=0, and is differentiated once"):
        dflow.grad(lambda: there(*ARGUMENTS).sum(), [there.variables["layer"]])()


def request(names: Any, ids: Any, bags: Any) -> bytes:
    strings = {"name": "names", "datatype": "BYTES", "shape": [len(names)], "data": [*names]}
    return json.dumps({"inputs": [strings, json_input("ids", ids), json_input("bags", bags)]}).encode()


def answer(url: str, arguments: Any) -> Any:
    status, body, _ = infer(url, "m", request(*arguments))
    assert status == 200, body
    return body["outputs"][0]["data"]


@pytest.mark.parametrize(("cache_rows", "hits", "misses"), [(0, 0, 10), (2, 4, 6), (100, 5, 5)])
def test_a_server_answers_with_tables_at_tasks(
    cache_rows: int, hits: int, misses: int, path: Path, cluster: tuple[MemoryCluster, Cluster]
) -> None:
    here = dflow.load(path, prefix=f"here {cache_rows}/")
    with served(path, ServingSettings(tables=cluster[1], cache_rows=cache_rows)) as server:
        for _ in range(2):
            np.testing.assert_allclose(answer(server.url, ARGUMENTS), here(*ARGUMENTS), rtol=1e-6)
        assert answer(server.url, EMPTY) == []
        if not cache_rows:  # the counts are those of the others
            np.testing.assert_allclose(answer(server.url, MANY), here(*MANY), rtol=1e-4)
            misses += ROWS
        assert infer(server.url, "m", request(NAMES, ARGUMENTS[1] + 1, ARGUMENTS[2]))[0] == 400
        metrics = call(server.url, "/metrics")[1].decode()
    found = dict(re.findall(r'^dflow_serve_table_(\w+)\{model="m",table="items"\} (\S+)$', metrics, re.MULTILINE))
    counted = [float(found[name]) for name in ("hits_total", "misses_total", "rows")]
    assert counted == [hits, misses, min(5, cache_rows)]
    assert (float(found["oldest_seconds"]) > 0) == (cache_rows > 0)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_server_loads_the_tables_of_a_task_that_has_left_again(is_started: bool, path: Path) -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        here = dflow.load(path, prefix=f"left {is_started}/")
        with served(path, ServingSettings(tables=worker)) as server:
            np.testing.assert_allclose(answer(server.url, ARGUMENTS), here(*ARGUMENTS), rtol=1e-6)
            cluster.tasks["ps:0"].close()
            if is_started:
                cluster.tasks["ps:0"] = start_task(
                    cluster.network, "/job:ps/task:0", cluster.coordinator.address, address=""
                )
            status, body, headers = infer(server.url, "m", request(*ARGUMENTS))
            assert (status, headers["retry-after"]) == (503, "1")
            assert ("ps:0 does not hold" if is_started else "ps:0 has left") in body["error"]
            assert call(server.url, "/v2/repository/models/m/load", b"{}")[0] == 200
            np.testing.assert_allclose(answer(server.url, ARGUMENTS), here(*ARGUMENTS), rtol=1e-6)


def test_a_function_needs_only_the_tasks_of_its_own_tables(tmp_path: Path) -> None:
    one, two, three = (dflow.Embedding(9, 2, name=name) for name in ("one", "two", "three"))
    functions = {"one": one, "two": two, "three": three, "whole": lambda ids: three.read()[0] * two(ids)}
    spec = dflow.spec("n", jnp.int32)
    dflow.export({name: (fn, spec) for name, fn in functions.items()}, platforms=["cpu"]).save(tmp_path / "m")
    body = json.dumps({"inputs": [json_input("ids", np.array([8], np.int32))]}).encode()
    with (
        memory_cluster(ps=2, workers=1) as cluster,
        closing(cluster.worker()) as worker,
        served(tmp_path / "m", ServingSettings(tables=worker)) as server,
    ):
        [version] = [model.current for model in server.models.values()]
        one_at, two_at = (version._loaded.variables[name].device for name in ("one/0", "two/0"))
        assert {one_at, two_at} == {"/job:ps/task:0", "/job:ps/task:1"}
        cluster.tasks[f"ps:{two_at[-1]}"].close()
        assert [infer(server.url, f"m.{name}", body)[0] for name in functions] == [200, 503, 200, 503]


def test_an_export_whose_lookups_are_left_out_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dflow.Embedding(9, 2, name="left out")
    monkeypatch.setattr(lookup_programs, "_zeros", lambda structs: 1 / 0)  # as JAX may fail, with any error
    monkeypatch.setattr(lookup_programs, "_needed_for_numbers", lambda *_: set())
    text = r"table is exported without the lookups of left out/0, .* JAX does not export them apart: division by zero"
    with pytest.warns(LookupsLeftOut, match=text):
        dflow.export({"table": (table, dflow.spec("n", jnp.int32))}, platforms=["cpu"])


def test_a_silent_task_is_asked_once_to_free_tables(path: Path, cluster: Any, monkeypatch: Any) -> None:
    there, asked = dflow.load(path, prefix="silent/", tables=cluster[1]), []

    def forget(variable: dflow.Variable, _: str) -> None:
        asked.append(variable.device)
        raise dflow.DeadlineExceeded("no answer", "start it again")

    there(*ARGUMENTS)
    monkeypatch.setattr(dflow.Variable, "forget", forget)
    free(there.variables.values(), "is gone")
    assert sorted(filter(None, asked)) == ["/job:ps/task:0", "/job:ps/task:1"]


@pytest.mark.parametrize(("module", "name"), [(served_version, "TableRows"), (model_server, "HttpServer")])
def test_a_server_that_fails_leaves_no_table_at_tasks(
    module: Any, name: str, path: Path, cluster: Any, monkeypatch: Any
) -> None:
    stores = [task.server.store for task in cluster[0].tasks.values()]
    before = [{*store.keys()} for store in stores]
    monkeypatch.delattr(module, name)  # used after the load
    with pytest.raises(NameError), served(path, ServingSettings(tables=cluster[1])):
        pass
    assert [{*store.keys()} for store in stores] == before


@given(st.integers(0, 5), st.lists(st.tuples(st.sets(st.integers(0, 9)), st.integers(0, 3))), st.integers(0, 6))
@settings(max_examples=examples(100), deadline=None)
def test_a_cache_returns_the_newest_rows_that_are_not_too_old(capacity: int, calls: Any, most_s: int) -> None:
    cache, known, now = RowCache(capacity, (2,), np.float32, most_s), {}, 0.0
    for number, (wanted, passed_s) in enumerate(calls):
        now += passed_s
        ids = np.array(sorted(wanted), np.int64)
        rows, is_here = cache.find(ids, now)
        for id, row in zip(ids[is_here].tolist(), rows[is_here], strict=True):
            assert row.tolist() == [known[id][0]] * 2
            assert now - known[id][1] <= most_s
        new = ids[~is_here]
        cache.add(new, np.full((len(new), 2), number, np.float32), now)
        known |= dict.fromkeys(new.tolist(), (number, now))
        assert len(cache) <= capacity
        if len(known) <= capacity:
            assert cache.find(new, now)[1].all()
