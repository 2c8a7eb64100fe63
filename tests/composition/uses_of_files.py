"""Uses of state through files: saved, restored elsewhere, after a kill, exported, loaded, served, copied row by row."""

from __future__ import annotations

import contextlib
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflow
from dflow.distributed import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.policy import SameMachine
from dflow.serving.model_server import ModelServer
from dflow.serving.served_version import ServingSettings
from tests.composition.kind import Batch, Outcome, Pair
from tests.composition.uses_on_a_cluster import named, on_tasks, one_worker, uses
from tests.distributed.cluster.test_recovered_state import Tasks


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that lives as long as the uses of one kind."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:  # tasks may write to their end
        yield Path(path)


def saved(name: str = "saved") -> Callable[[Pair], Outcome]:
    """Save after two steps, do a third, restore, and do it again."""

    def run(pair: Pair) -> Outcome:
        held, reference = pair.make(), pair.kind.reference()
        step, (first, second, third) = dflow.jit(held.step), pair.batches()
        with tempfile.TemporaryDirectory() as place:
            step(first), step(second)
            dflow.save(f"{place}/{name}", held.items)
            again = step(third)
            dflow.restore(f"{place}/{name}", held.items)
        repeated = step(third)
        expected = [reference.step(given) for given in (first, second, third)]
        return [("results", [again, repeated], [expected[2]] * 2), ("content", held.state(), reference.state())]

    return run


def restored_elsewhere(pair: Pair, cluster: Cluster) -> Outcome:
    """Save in one process; restore into state on tasks, in another number of shards where there are shards."""
    held, reference, (first, second, third) = pair.make(), pair.kind.reference(), pair.batches()
    step = dflow.jit(held.step)
    step(first), step(second)
    with cluster.parameter_servers():
        other = pair.make("-elsewhere", **pair.kind.divided_otherwise)
    with tempfile.TemporaryDirectory() as place:
        dflow.save(f"{place}/one", held.items, names=lambda name: named_alike(pair, name))
        dflow.restore(f"{place}/one", other.items, names=lambda name: named_alike(pair, name, "-elsewhere"))
    result = dflow.jit(other.step)(third)
    expected = [reference.step(given) for given in (first, second, third)]
    return [("result", result, expected[2]), ("content", other.state(), reference.state())]


def named_alike(pair: Pair, name: str, part: str = "") -> str:
    """Return a variable's name without what differs between the parts of a use, also in a Keras model's names."""
    prefix = pair.prefix(part)
    return name.replace(prefix, "state").replace(prefix.replace("/", "-"), "state")


def checkpointed(pair: Pair) -> Outcome:
    """Do two of three steps with a manager; resume in a second program with the same names, as after a death."""
    held, reference, batches = pair.make(), pair.kind.reference(), pair.batches()
    step = dflow.jit(held.step)
    with tempfile.TemporaryDirectory() as place:
        with dflow.CheckpointManager(place, held.items, every=1) as manager:
            for number in range(2):
                step(batches[number])
                manager.step(number)
                manager.wait()
        step(batches[2])  # is undone
        with dflow.CheckpointManager(place, held.items, every=1) as manager:
            for number in range(manager.next_step, 3):
                step(batches[number])
                manager.step(number)
                manager.wait()
    for given in batches:
        reference.step(given)
    return [("next step", manager.next_step, 2), ("content", held.state(), reference.state())]


@contextlib.contextmanager
def tasks_with_snapshots() -> Iterator[Tasks]:
    """Two parameter tasks that write snapshots, and a worker."""
    with folder() as path:
        running = Tasks(path, every_s=0.05)
        yield running
        running.close()


def killed(pair: Pair, tasks: Tasks) -> Outcome:
    """Kill one parameter task and then the other while an asynchronous run is on; both return to a snapshot."""
    with tasks.worker.parameter_servers():
        held = pair.make()
    batches, reference = pair.batches(range(6)), pair.kind.reference()

    def supplied(number: int) -> Batch:
        if number in kills:
            task = kills.pop(number)
            tasks.await_new_snapshot()
            tasks.start_again(task)
        return batches[number]

    kills = {2: 0, 4: 1}
    list(Async(tasks.worker).run(dflow.jit(held.step), supplied, steps=len(batches), name=named(pair)))
    for given in batches:
        reference.step(given)
    return [("kills", len(kills), 0), ("content", held.state(), reference.state())]


def specified(given: Any, how: str) -> Any:
    """Return the types of a batch: of its sizes, or of any number of rows."""

    def of_leaf(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return dflow.spec(", ".join([how, *map(str, array.shape[1:])]), array.dtype)

    return jax.tree.map(of_leaf, given)


def as_exported(pair: Pair, function: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    """Return a function as it is exported: its batch is of containers and arrays alone."""
    return lambda given: function(pair.kind.rebuilt(given))


def exported(how: str, **options: Any) -> Callable[[Pair, Cluster], Outcome]:
    """Export the step, load it, and train with what was loaded; the program's own state stays as it was."""

    def run(pair: Pair) -> Outcome:
        held, reference, batches = pair.make(), pair.kind.reference(), pair.batches()
        rows = how or str(len(batches[0]["x"]))
        with tempfile.TemporaryDirectory() as place:
            step = as_exported(pair, held.step)
            arguments = specified(pair.kind.plain(batches[0]), rows)
            path = dflow.export({"step": (step, arguments)}, **options).save(f"{place}/model")
            loaded = dflow.load(path, prefix=f"loaded-{named(pair)}/")
            if how == "b":
                batches.append(pair.joined((3, 4)))
            results = [loaded.step(pair.kind.plain(given)) for given in batches]
        expected = [reference.step(given) for given in batches]
        untouched = pair.kind.reference()
        return [("results", results, expected), ("own content", held.state(), untouched.state())]

    return run


def small(weights: str) -> Callable[[Pair], Outcome]:
    """Export what reads the state with small weights; the result is near, and the file is smaller."""

    def run(pair: Pair) -> Outcome:
        held, reference, given = pair.make(), pair.kind.reference(), pair.batches((1,))[0]
        look = as_exported(pair, held.look or held.step)
        plain = pair.kind.plain(given)
        with tempfile.TemporaryDirectory() as place:
            path = dflow.export({"look": (look, specified(plain, "4"))}, weights=weights).save(f"{place}/model")
            loaded = dflow.load(path, prefix=f"small-{named(pair)}/")
            result = float(loaded.look(plain))
        expected = reference.step(given)
        assert abs(result - expected) <= 0.03 * max(1, abs(expected))
        return [("content", held.state(), pair.kind.reference().state())]

    return run


def served(pair: Pair) -> Outcome:
    """Ask a server for the result of a read, or of a step that learns, over HTTP."""
    held, reference, given = pair.make(), pair.kind.reference(), pair.batches((1,))[0]
    with tempfile.TemporaryDirectory() as place:
        dflow.export(as_exported(pair, held.step), specified(pair.kind.plain(given), "4")).save(f"{place}/model/1")
        settings = ServingSettings(learn=True)
        server = ModelServer(Path(place) / "model", TcpAddress("127.0.0.1", 0), settings, SameMachine())
        try:
            results = [asked(server.url, pair.kind.plain(given)) for _ in range(2)]
        finally:
            server.stop()
    return [("results", results, [reference.step(given), reference.step(given)])]


NAMES = {"float32": "FP32", "int32": "INT32", "uint32": "UINT32"}


def asked(url: str, given: Batch) -> float:
    """Send a batch by the Open Inference Protocol; return the one output."""
    described = json.loads(urllib.request.urlopen(f"{url}/v2/models/model", timeout=30).read())
    leaves = {path: np.asarray(leaf) for path, leaf in named_leaves(given)}
    inputs = [
        {"name": one["name"], "datatype": one["datatype"], "shape": leaf.shape, "data": leaf.ravel().tolist()}
        for one in described["inputs"]
        for leaf in [leaves[one["name"].removeprefix("given")]]
    ]
    request = urllib.request.Request(f"{url}/v2/models/model/infer", json.dumps({"inputs": inputs}).encode())
    answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
    return float(answer["outputs"][0]["data"][0])


def named_leaves(given: Batch) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch with the expressions that select them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]:
        yield jax.tree_util.keystr(path), leaf


def copied(pair: Pair) -> Outcome:
    """Keep a copy of a table by its changed rows."""
    held, reference = pair.make(), pair.kind.reference()
    table = list(held.items.values())[-1]
    step, copy = dflow.jit(held.step), {}

    def renew() -> None:
        for numbers, rows in table.changed_rows("copy"):
            copy.update(zip(numbers.tolist(), np.asarray(rows), strict=True))

    for given in pair.batches():
        renew()
        step(given)
        reference.step(given)
    renew()
    found = np.stack([copy[row] for row in sorted(copy)])
    return [("copy", found, np.asarray(table.read())), ("content", held.state(), reference.state())]


def released(pair: Pair) -> Outcome:
    """Make the state in a container, reset that, and make it again: it begins with its first values."""
    name = f"lifetime-of-{pair.kind.name}".replace(" ", "-").replace(",", "")
    with dflow.container(name):
        held = pair.make()
    dflow.jit(held.step)(pair.batches()[0])
    dflow.reset_container(name)
    with dflow.container(name):
        again = pair.make()
    reference, given = pair.kind.reference(), pair.batches()[1]
    result = dflow.jit(again.step)(given)
    return [("result", result, reference.step(given)), ("content", again.state(), reference.state())]


USES = [
    *uses(
        "through files",
        contextlib.nullcontext,
        {
            "save, restore": saved(),
            "save, restore as safetensors": saved("saved.safetensors"),
            "CheckpointManager": checkpointed,
            "container": released,
            "changed_rows": copied,
            "export": exported(""),
            "export of any size": exported("b"),
            "export in int8": small("int8"),
            "export in bfloat16": small("bfloat16"),
            "serve": served,
        },
    ),
    *uses(
        "through files",
        one_worker,
        {
            "restore onto tasks": restored_elsewhere,
            "save, restore on tasks": on_tasks(saved()),
            "changed_rows on tasks": on_tasks(copied),
            "export from tasks": on_tasks(exported("")),
            "export from tasks, of any size": on_tasks(exported("b")),
        },
    ),
    *uses("through files", tasks_with_snapshots, {"snapshot, kill": killed}),
]
