"""Keras models: a step of dflow equals Keras's own, alone and on a cluster, and the values go back to Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import dflow
from dflow.testing import memory_cluster

keras = pytest.importorskip("keras")
layers = keras.layers

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]

WORDS, COLUMNS, STEPS = 20, 3, 4


def batches(seed: int = 0, steps: int = STEPS, size: int = 6) -> list[tuple[Any, Any]]:
    drawn = np.random.default_rng(seed)
    return [
        (drawn.integers(WORDS, size=(size, COLUMNS), dtype="i4"), drawn.normal(size=(size, 1)).astype("f4"))
        for _ in range(steps)
    ]


def model_of(embedding: Any, *more: Any, optimizer: Any = "sgd", **compiled: Any) -> Any:
    """Return a small compiled model."""
    model = keras.Sequential(
        [keras.Input((COLUMNS,), dtype="int32"), embedding, layers.Flatten(), *more, layers.Dense(1, name="out")],
        name="model",
    )
    model.compile(optimizer, "mse", **compiled)
    return model


def plain(optimizer: Any = "sgd") -> Any:
    """Return a model with the same first values each time."""
    keras.utils.set_random_seed(3)
    return model_of(layers.Embedding(WORDS, 2, name="words"), optimizer=optimizer)


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_step_is_that_of_keras(tmp_path: Path) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)

    def make() -> Any:
        keras.utils.set_random_seed(3)
        words = layers.Embedding(WORDS, 2, name="words", embeddings_regularizer="l2")
        # A bias before a batch norm has a gradient of rounding errors alone, which Adam makes large.
        dense = layers.Dense(4, kernel_regularizer="l2", use_bias=False, name="h")
        more = (dense, layers.BatchNormalization(name="norm"))
        dropout = layers.Dropout(0.3, seed=1, name="dropout")
        return model_of(
            words, *more, dropout, optimizer=keras.optimizers.SGD(schedule, 0.9, global_clipnorm=1.0), metrics=["mae"]
        )

    ours, theirs = dflow.keras.Model(make()), make()
    for number, batch in enumerate(batches()):
        weights = np.linspace(0, 1, 6, dtype="f4") if number == 1 else None
        theirs.reset_metrics()
        want = theirs.train_on_batch(*batch, sample_weight=weights, return_dict=True)
        got = ours.train_step(*batch, *([] if weights is None else [weights]))
        assert got.keys() == want.keys() == {"loss", "mae"}
        assert_same([got[name] for name in want], list(want.values()))
    x, _ = batches()[0]
    trained = ours.to_keras()
    # The state of seeds too: the masks of the dropout are the same.
    assert_same([v.value for v in trained.variables], [v.value for v in theirs.variables])
    assert_same([v.value for v in trained.optimizer.variables], [v.value for v in theirs.optimizer.variables])
    trained.save(tmp_path / "model.keras")
    assert_same([ours(x)], [keras.models.load_model(tmp_path / "model.keras")(x)])


def test_a_synchronous_run_of_two_workers_is_keras_with_both_batches() -> None:
    theirs, parts = plain("adam"), [batches(0), batches(1)]
    for halves in zip(*parts, strict=True):
        theirs.train_on_batch(*map(np.concatenate, zip(*halves, strict=True)))
    with memory_cluster(ps=2, workers=2) as memory:
        workers = [memory.worker(index, dflow.ClusterSettings(step_timeout_s=30.0)) for index in range(2)]

        def made(worker: Any) -> Any:
            with worker.parameter_servers():
                return dflow.keras.Model(plain("adam"))

        def train(worker: Any, model: Any, part: Any) -> None:
            for _ in dflow.distributed.Sync(worker).run(model.train_step, part, steps=STEPS, name="keras"):
                pass

        # One after another: Keras draws first values by a seed of the whole process.
        one, two = models = [made(worker) for worker in workers]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train, workers, models, parts))
        assert {variable.device for variable in one.trainable.values()} == {"/job:ps/task:0", "/job:ps/task:1"}
        assert_same([v.value for v in one.to_keras().weights], [v.value for v in theirs.weights])
        assert_same([v.value for v in two.to_keras().weights], [v.value for v in theirs.weights])
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_step_updates_only_the_rows_that_were_looked_up(optimizer: str) -> None:
    model = dflow.keras.Model(plain(optimizer))
    graph = str(dflow.graph(model.train_step, *batches()[0]))
    assert "var.scatter_add(%model/words/embeddings" in graph
    assert "var.read(%model/words/embeddings)" not in graph


def test_a_table_on_two_tasks_is_trained_saved_and_given_back(tmp_path: Path) -> None:
    theirs = plain()
    first = theirs.get_weights()
    for batch in batches():
        theirs.train_on_batch(*batch)
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            words = dflow.keras.ShardedEmbedding(WORDS, 2, name="words", by="modulo")
            model = dflow.keras.Model(model_of(words), tables=optax.sgd(0.01))
        assert [shard.device for shard in words.table.shards] == ["/job:ps/task:0", "/job:ps/task:1"]
        assert abs(words.table.read()).max() <= 0.05  # Keras's "uniform"
        words.table.assign(first[0])
        dflow.assign(model.trainable, dict(zip(("model/out/kernel", "model/out/bias"), first[1:], strict=True)))
        for _ in dflow.distributed.Async(cluster).run(model.train_step, batches(), steps=STEPS):
            pass
        dflow.save(tmp_path / "state", model.state)
        copy = model.to_keras()
        assert [type(layer).__name__ for layer in copy.layers] == ["Embedding", "Flatten", "Dense"]
        assert_same(copy.get_weights(), theirs.get_weights())
        before = words.table.read()
        words.table.assign(first[0])
        assert "model/words/embeddings" in dflow.restore(tmp_path / "state", model.state).restored
        assert_same([words.table.read()], [before])
        x, y = batches()[0]
        with pytest.raises(
            dflow.InputError, match=r"table 'model/words/embeddings': expected ids from 0 to 19, got \d"
        ):
            model.train_step(x + WORDS, y)
        with pytest.raises(dflow.VariableError, match=r"expected a model of Keras's own layers(.|\n)*to_keras\(\)"):
            model._model.save(tmp_path / "model.keras")
        cluster.close()


def test_padding_is_masked_as_by_keras() -> None:
    def make(words: Any) -> Any:
        return keras.Sequential([keras.Input((COLUMNS,), dtype="int32"), words, layers.GlobalAveragePooling1D()])

    words = dflow.keras.ShardedEmbedding(WORDS, 2, mask_zero=True, name="padded")
    ours, theirs = dflow.keras.Model(make(words)), make(layers.Embedding(WORDS, 2, mask_zero=True))
    theirs.set_weights([words.table.read()])
    ids = np.array([[1, 0, 0], [4, 5, 0]], "i4")
    assert_same([ours(ids)], [theirs(ids)])
    with pytest.raises(dflow.PlainJitError, match=r"variable 'sequential.*/padded/embeddings/0' is used in a function"):
        ours._model.predict(ids, verbose=0)


class OwnStep(keras.Model):  # type: ignore[misc]
    def train_step(self, state: Any, data: Any) -> Any:
        raise AssertionError("not called")


class OwnLayer(layers.Layer):  # type: ignore[misc]
    """A layer with another one's name within, without a scope of its own."""

    def build(self, shape: Any) -> None:
        self.built = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(1, name="same")
        self.inner.build((None, 2))

    def call(self, x: Any) -> Any:
        return self.inner(x)


def own_step() -> Any:
    x = keras.Input((2,))
    return OwnStep(x, layers.Dense(1)(x))


def scaled() -> Any:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: layers.Dense(1), r"expected a keras.Model, got a Dense"),
        (lambda: keras.Sequential([layers.Dense(1)]), r"expected a built model, got one without variables"),
        (own_step, r"expected the train_step of keras.Model, got one of OwnStep"),
        (scaled, r"expected an optimizer without a loss scale, got LossScaleOptimizer\n.*\n  use the policy"),
    ],
    ids=["layer", "not built", "own step", "loss scale"],
)
def test_a_model_that_cannot_be_used_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(dflow.DflowError, match=says):
        dflow.keras.Model(make())


def test_tables_and_their_optimizer_come_together() -> None:
    with pytest.raises(dflow.TrainingError, match=r"expected an optax transformation for .* layers, got None"):
        dflow.keras.Model(model_of(dflow.keras.ShardedEmbedding(WORDS, 2, name="words")))
    with pytest.raises(dflow.TrainingError, match=r"expected None for a model without .*, got GradientTransf"):
        dflow.keras.Model(plain(), tables=optax.sgd(0.1))
    uncompiled = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(dflow.TrainingError, match=r"expected None for a model without"):
        dflow.keras.Model(uncompiled, tables=optax.sgd(0.1))


def test_a_step_needs_a_compiled_model_whose_variables_stay() -> None:
    x = keras.Input((2,))
    model = keras.Model(x, layers.Dense(1, name="head")(layers.Dense(2, name="body")(x)))
    with pytest.raises(dflow.TrainingError, match=r"expected a compiled model(.|\n)*call model.compile"):
        _ = dflow.keras.Model(model).train_step
    ours = dflow.keras.Model(model)
    model.get_layer("body").trainable = False
    with pytest.raises(dflow.VariableError, match=r"the 4 trainable variables that it had at first, got 2"):
        ours(np.ones((1, 2), "f4"))
    # Its values go back all the same.
    ours.trainable["body/bias"].assign(np.ones(2, "f4"))
    assert_same([ours.to_keras().get_layer("body").bias.value], [np.ones(2)])


def test_names_do_not_depend_on_the_models_made_before() -> None:
    def made() -> dflow.keras.Model:
        return dflow.keras.Model(model_of(layers.Embedding(WORDS, 2, name="words"), layers.Dropout(0.1)))

    assert made().non_trainable.keys() == made().non_trainable.keys() == {"model/seeds/0"}
    x = keras.Input((2,))
    twice = keras.Model(x, [layers.Dense(1, name="same")(x), OwnLayer()(x)])
    with pytest.raises(dflow.VariableError, match=r"expected each path once, got two of 'same/kernel'(.|\n)*name="):
        dflow.keras.Model(twice)


def test_the_backend_is_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    require = dflow.keras.backend.require_keras_on_jax
    with monkeypatch.context() as patch:
        patch.setattr(keras, "__version__", "3.9.2")
        with pytest.raises(dflow.ConfigError, match=r"expected Keras 3.12 or newer, got 3.9.2"):
            require()
        patch.setattr(keras.config, "backend", lambda: "torch")
        with pytest.raises(dflow.ConfigError, match=r"expected KERAS_BACKEND=jax, got torch\n.*\n  set it before"):
            require()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "keras", None)
        with pytest.raises(dflow.ConfigError, match=r"not installed\n.*\n  pip install 'dflow\[keras\]'"):
            require()
        patch.delitem(sys.modules, "keras")
        patch.setenv("KERAS_BACKEND", "tensorflow")
        with pytest.raises(dflow.ConfigError, match=r"expected KERAS_BACKEND=jax, got tensorflow"):
            require()
