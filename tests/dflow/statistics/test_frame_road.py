"""A DataFrame, measured, trained on a cluster with filled-up batches, evaluated, exported, and served by names."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.policy import SameMachine
from dflow.serving.model_server import ModelServer
from dflow.serving.served_version import ServingSettings
from dflow.testing import memory_cluster

pytestmark = pytest.mark.once

#: Rows of a batch, and batches of an epoch, the last with one row: an even number, for two workers.
SIZE, BATCHES, EPOCHS = 8, 6, 3


def frame() -> Any:
    pd = pytest.importorskip("pandas")
    draw = np.random.default_rng(0)
    count = SIZE * (BATCHES - 1) + 1
    return pd.DataFrame(
        {
            "user": [None if row % 9 == 0 else f"user {draw.integers(12)}" for row in range(count)],
            "city": pd.Categorical([("Oslo", "Lima", None)[row % 3] for row in range(count)]),
            "age": pd.array([None if row % 5 == 0 else int(draw.integers(18, 70)) for row in range(count)], "Int64"),
            "clicked": draw.random(count) < 0.5,
        }
    )


class Model:
    def __init__(self, name: str, found: Any, cities: list[str]) -> None:
        zeros = jax.nn.initializers.zeros
        self.users = dflow.Embedding(64, 4, vocabulary=dflow.Vocabulary(), initializer=zeros, name=f"{name}/users")
        self.lookup = dflow.data.StringLookup(cities, name=f"{name}/city")
        self.cities = dflow.Embedding(len(self.lookup), 4, initializer=zeros, name=f"{name}/cities")
        self.age = dflow.data.Normalization(found["age"], name=f"{name}/age")
        self.weights = dflow.Variable(lambda: jnp.arange(1.0, 6.0) / 5, name=f"{name}/weights")
        held = [self.users, self.cities, self.weights]
        self.optimizer = dflow.Optimizer(optax.sgd(0.5), held, name=f"{name}/sgd")

    def logits(self, users: Any, cities: Any, age: Any) -> Any:
        both = users + cities
        return jnp.concatenate([both, self.age(age)[:, None]], 1) @ self.weights

    def train(self, batch: Any) -> Any:
        users = self.users.find(batch["user"])

        def loss() -> Any:
            logits = self.logits(self.users(users), self.cities(batch["city"] + 1), batch["age"])
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["clicked"].astype(jnp.float32))
            return (losses * batch["mask"]).sum() / SIZE

        value, gradients = dflow.value_and_grad(loss, self.optimizer.variables)()
        self.optimizer.apply(gradients, found=users)
        return value

    def chance(self, user: Any, city: Any, age: Any) -> Any:
        return jax.nn.sigmoid(self.logits(self.users(user), self.cities(self.lookup(city)), age))

    def measure(self, batch: Any) -> Any:
        logits = self.logits(self.users(batch["user"]), self.cities(batch["city"] + 1), batch["age"])
        is_right = ((logits > 0) == batch["clicked"]).astype(jnp.float32)
        return {"accuracy": jnp.mean(is_right, where=batch["mask"]), "examples": batch["mask"].sum()}

    def export(self, path: Path) -> None:
        def click(user: Any, city: Any, age: Any) -> Any:
            return {"chance": self.chance(user, city, age)}

        names = dflow.spec("b", np.str_)
        dflow.export(click, names, names, dflow.spec("b", jnp.float32)).save(path)


def doubled(data: Any) -> Any:
    """Yield the rounds of two workers as one process has them."""
    for number in range(0, len(data), 2):
        yield jax.tree.map(lambda *parts: np.concatenate(parts), data[number], data[number + 1])


def test_a_frame_from_statistics_to_an_answer(tmp_path: Path) -> None:
    table = frame()
    found = dflow.data.statistics(table)
    stated = {"user": "?", "city": "unknown", "age": round(float(found["age"].quantile(0.5)))}
    options = {"missing": stated, "pad": True, "shuffle": True, "seed": 1, "epochs": EPOCHS}
    data = dflow.data.batches(table, SIZE, **options)
    cities = data.categories["city"].tolist()
    with memory_cluster(ps=1, workers=2) as memory:
        workers = [memory.worker(index) for index in range(2)]

        def work(index: int) -> Any:
            strategy = dflow.distributed.Sync(workers[index])
            mine = dflow.data.statistics(table, cluster=workers[index], name="road")
            with strategy.variables():
                model = Model("shared", mine, cities)
            steps = EPOCHS * BATCHES // 2
            losses = [*strategy.run(dflow.jit(model.train), lambda n: data[n], steps=steps, name="road")]
            result = dflow.evaluate(model.measure, dflow.data.batches(table, SIZE, missing=stated, pad=True))
            return model, losses, result

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, range(2)))
        model, _, evaluation = results[0]
        # One process, with the batches of both workers as one: the sum over them is divided by the rows of one.
        alone, losses = Model("alone", found, cities), []
        step = dflow.jit(alone.train)
        for batch in doubled(data):
            batch["mask"] = batch["mask"] * np.float32(0.5)
            losses.append(float(step(batch)))
        both = np.mean([[float(loss) for loss in done[1]] for done in results], axis=0)
        np.testing.assert_allclose(losses, both, rtol=1e-5)
        assert losses[-1] < losses[0]
        users, towns = ["user 1", "nobody", "?"], ["Oslo", "unknown", "Rome"]
        ages = np.array([20, 30, 60], np.float32)
        chances = np.asarray(dflow.jit(model.chance)(users, towns, ages))
        np.testing.assert_allclose(chances, dflow.jit(alone.chance)(users, towns, ages), rtol=1e-5)
        whole = dflow.jit(alone.measure)(
            jax.tree.map(
                lambda *parts: np.concatenate(parts), *dflow.data.batches(table, SIZE, missing=stated, pad=True)
            )
        )
        assert evaluation["examples"] == len(table)
        assert abs(evaluation["accuracy"] - float(whole["accuracy"])) < 1e-6
        model.export(tmp_path / "served" / "click" / "1")
    server = ModelServer(tmp_path / "served", TcpAddress("127.0.0.1", 0), ServingSettings(), SameMachine())
    try:
        inputs = [{"name": "age", "datatype": "FP32", "shape": [3], "data": ages.tolist()}]
        for name, values in (("user", users), ("city", towns)):
            inputs.append({"name": name, "datatype": "BYTES", "shape": [3], "data": values})
        body = json.dumps({"inputs": inputs}).encode()
        with urllib.request.urlopen(f"{server.url}/v2/models/click/infer", body, timeout=60) as answer:
            served = json.load(answer)["outputs"][0]["data"]
    finally:
        server.stop()
    np.testing.assert_allclose(served, chances, rtol=1e-5)
