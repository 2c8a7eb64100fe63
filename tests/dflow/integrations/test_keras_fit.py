"""`fit` of a Keras model equals Keras's own, in one process and by two workers, with its callbacks and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.training import strategy as strategies
from dflow.testing import memory_cluster

keras = pytest.importorskip("keras")
layers, calls = keras.layers, keras.callbacks

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]

ROWS, EXAMPLES = 20, 103
drawn = np.random.default_rng(0)
IDS = drawn.integers(ROWS, size=(EXAMPLES, 3), dtype="i4")
CLICKS = (IDS.sum(1, keepdims=True) % 3 == 0).astype("f4")


def made(optimizer: Any = "adam", words: Any = None, **compiled: Any) -> Any:
    """Return a small compiled model, with the same first values each time."""
    keras.utils.set_random_seed(3)
    words = words or layers.Embedding(ROWS, 4, name="words", embeddings_regularizer="l2")
    inside = [words, layers.Flatten(), layers.Dense(1, "sigmoid", kernel_regularizer="l2", name="out")]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *inside], name="clicks")
    given = {"loss": "binary_crossentropy", "metrics": ["accuracy", keras.metrics.AUC(name="auc")], **compiled}
    model.compile(optimizer, **given)
    return model


def assert_same(ours: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    """Compare histories: their names, and their values."""
    assert sorted(ours) == sorted(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=tolerance, atol=1e-7, err_msg=name)


def on_workers(fit: Callable[[Any, int], Any], count: int = 2, kind: Any = dflow.distributed.Sync) -> list[Any]:
    """Return what `fit(model, index)` returns on each worker of a cluster."""
    with memory_cluster(ps=2, workers=count) as memory:
        workers = [memory.worker(index, dflow.ClusterSettings(step_timeout_s=60.0)) for index in range(count)]
        # One after another: Keras draws first values by a seed of the whole process.
        models = [dflow.keras.Model(made(), strategy=kind(worker)) for worker in workers]
        keras.utils.set_random_seed(5)
        with ThreadPoolExecutor(count) as pool:
            found = [*pool.map(fit, models, range(count))]
        for worker in workers:
            worker.close()
    return found


def callbacks(folder: Path) -> list[Any]:
    folder.mkdir(exist_ok=True)
    return [
        calls.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.02),
        calls.EarlyStopping(monitor="val_auc", mode="max", patience=2, restore_best_weights=True),
        calls.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
        calls.CSVLogger(str(folder / "log.csv")),
    ]


ARGUMENTS = {"batch_size": 16, "epochs": 6, "validation_split": 0.2, "verbose": 0}


def test_fit_in_one_process_is_that_of_keras(tmp_path: Path) -> None:
    given = {**ARGUMENTS, "class_weight": {0: 1.0, 1: 2.0}}
    theirs, ours = made("sgd", weighted_metrics=["mae"]), made("sgd", weighted_metrics=["mae"])
    keras.utils.set_random_seed(5)
    want = [theirs.fit(IDS, CLICKS, callbacks=callbacks(tmp_path / "theirs"), **given).history for _ in range(2)]
    model = dflow.keras.Model(ours)
    keras.utils.set_random_seed(5)
    got = [model.fit(IDS, CLICKS, callbacks=callbacks(tmp_path / "ours"), **given).history for _ in range(2)]
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)
    for mine, its in zip(model.to_keras().get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {path.name for path in (tmp_path / "ours").iterdir()}
    theirs.load_weights(tmp_path / "ours" / "2.weights.h5")
    assert_same(
        model.evaluate(IDS, CLICKS, verbose=0, return_dict=True),
        model.to_keras().evaluate(IDS, CLICKS, verbose=0, return_dict=True),
    )
    batches = {"batch_size": 16, "verbose": 0}  # with more steps than batches, each example counts once
    assert_same(
        dict(enumerate(model.evaluate(IDS, CLICKS, steps=999, **batches))),
        dict(enumerate(model.evaluate(IDS, CLICKS, **batches))),
    )
    np.testing.assert_allclose(model.predict(IDS, verbose=0), model(IDS), rtol=1e-6)


def test_fit_of_two_synchronous_workers_is_that_of_keras(tmp_path: Path) -> None:
    theirs = made()
    keras.utils.set_random_seed(5)
    want = theirs.fit(IDS, CLICKS, callbacks=callbacks(tmp_path / "theirs"), **ARGUMENTS).history

    def fit(model: Any, index: int) -> Any:
        # Worker 0 alone has callbacks that are called, and writes the files.
        found = model.fit(IDS, CLICKS, callbacks=callbacks(tmp_path / f"ours{index}"), **ARGUMENTS).history
        return found, model.evaluate(IDS, CLICKS, verbose=0, return_dict=True), model.to_keras().get_weights()

    for history, metrics, weights in on_workers(fit):
        assert_same(history, want)
        assert_same(metrics, theirs.evaluate(IDS, CLICKS, verbose=0, return_dict=True))
        for mine, its in zip(weights, theirs.get_weights(), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
    assert not [*(tmp_path / "ours1").iterdir()]
    ours, expected = ((tmp_path / name / "log.csv").read_text().splitlines() for name in ("ours0", "theirs"))
    assert ours[0] == expected[0]
    assert len(ours) == len(expected)


def test_each_example_is_in_the_metrics_of_an_epoch_once() -> None:
    model = dflow.keras.Model(made(loss="mse", metrics=[Examples()]))
    assert model.fit(IDS, CLICKS, batch_size=8, epochs=3, verbose=0).history["examples"] == [EXAMPLES] * 3

    def fit(model: Any, index: int) -> Any:
        model.compile("sgd", "mse", metrics=[Examples()])
        return model.fit(IDS, CLICKS, batch_size=8, epochs=3, verbose=0, validation_data=(IDS, CLICKS)).history

    for kind in (dflow.distributed.Async, dflow.distributed.Sync):
        for history in on_workers(fit, kind=kind):
            assert history["examples"] == history["val_examples"] == [EXAMPLES] * 3


class Examples(keras.metrics.Metric):  # type: ignore[misc]
    """Counts examples."""

    def __init__(self) -> None:
        super().__init__(name="examples")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign(self.count + y_pred.shape[0])

    def result(self) -> Any:
        return self.count.value


class Largest(Examples):
    """The largest prediction, which is no sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign(keras.ops.maximum(self.count, y_pred.shape[0]))


class Items(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return IDS[index * 16 : index * 16 + 16], CLICKS[index * 16 : index * 16 + 16]


def generated() -> Iterator[Any]:
    while True:
        yield from (Items()[index] for index in range(6))


def datasets() -> dict[str, Any]:
    grain = pytest.importorskip("grain")
    numbers = grain.MapDataset.range(6)
    return {
        "generator": generated(),
        "PyDataset": Items(),
        "Grain": numbers.map(lambda index: Items()[int(index)]),
        "iterated Grain": numbers.map(lambda index: Items()[int(index)]).to_iter_dataset(),
    }


@pytest.mark.parametrize("name", ["generator", "PyDataset", "Grain", "iterated Grain"])
def test_data_of_any_form_is_trained_on_as_by_keras(name: str) -> None:
    arguments = {"epochs": 2, "steps_per_epoch": 6, "shuffle": False, "verbose": 0}
    want = made().fit(IDS[:96], CLICKS[:96], batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert_same(dflow.keras.Model(made()).fit(datasets()[name], **arguments).history, want)


def test_a_table_of_arrow_gives_inputs_by_name() -> None:
    arrow = pytest.importorskip("pyarrow")
    inputs = {name: keras.Input((1,), name=name, dtype="float32") for name in ("a", "b")}
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([*inputs.values()])))
    model.compile("sgd", "mse")
    columns = {name: np.arange(8, dtype="f4")[:, None] + at for at, name in enumerate(inputs)}
    table = arrow.table({name: column[:, 0] for name, column in columns.items()})
    ours = dflow.keras.Model(model)
    first = model.get_weights()
    got = ours.fit(table, arrow.array(np.ones(8, "f4")), shuffle=False, verbose=0).history
    model.set_weights(first)
    assert_same(got, model.fit(columns, np.ones(8, "f4"), shuffle=False, verbose=0).history)


def test_the_next_process_of_worker_0_goes_on_with_the_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"batch_size": 16, "epochs": 5, "shuffle": False, "verbose": 0, "validation_data": (IDS, CLICKS)}

    def stop() -> Any:
        return calls.EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True)

    theirs = made(keras.optimizers.SGD(5.0))
    want = theirs.fit(IDS, CLICKS, callbacks=[stop()], **given).history

    class Killed(calls.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 3:
                raise KeyboardInterrupt

    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        model = dflow.keras.Model(made(keras.optimizers.SGD(5.0)), strategy=dflow.distributed.Sync(cluster))
        with pytest.raises(KeyboardInterrupt):
            model.fit(IDS, CLICKS, callbacks=[stop(), Killed()], **given)
        cluster.close()
        monkeypatch.setattr(strategies, "_run_counts", type(strategies._run_counts)())
        cluster = memory.worker()
        model = dflow.keras.Model(made(keras.optimizers.SGD(5.0)), strategy=dflow.distributed.Sync(cluster))
        assert_same(model.fit(IDS, CLICKS, callbacks=[stop()], **given).history, want)
        for mine, its in zip(model.to_keras().get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
        cluster.close()


def test_callbacks_of_batches_see_the_metrics_and_change_the_training(capsys: Any) -> None:
    class Seen(calls.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append((batch, logs["loss"]))
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)
            if len(self.losses) == 9:
                self.model.stop_training = True

    seen, given = (Seen(), Seen()), {"batch_size": 16, "shuffle": False, "epochs": 3, "verbose": 1}
    want = made("sgd").fit(IDS, CLICKS, callbacks=[seen[0]], **given).history
    got = dflow.keras.Model(made("sgd")).fit(IDS, CLICKS, callbacks=[seen[1]], **given).history
    assert_same(got, want)
    np.testing.assert_allclose(seen[1].losses, seen[0].losses, rtol=1e-5)
    assert "9/7" not in (shown := capsys.readouterr().out)
    assert shown.count("7/7") > 2  # the bars of both


def test_a_model_with_a_table_on_tasks_is_fitted_and_evaluated() -> None:
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            words = dflow.keras.ShardedEmbedding(ROWS, 4, name="words")
            inner = made("adam", words)
        model = dflow.keras.Model(inner, strategy=dflow.distributed.Sync(cluster), tables=optax.adagrad(0.5))
        before = model.evaluate(IDS, CLICKS, verbose=0, return_dict=True)
        history = model.fit(IDS, CLICKS, batch_size=16, epochs=4, verbose=0).history
        assert history["loss"][-1] < before["loss"]
        assert model.predict(IDS, verbose=0).shape == (EXAMPLES, 1)
        with pytest.raises(dflow.VariableError, match=r"a callback asks for its weights(.|\n)*restore_best_weights"):
            model.fit(IDS, CLICKS, verbose=0, callbacks=[calls.EarlyStopping("loss", restore_best_weights=True)])
        cluster.close()


@pytest.mark.parametrize(
    ("fit", "says"),
    [
        (
            lambda model: model.fit(generated(), shuffle=False),
            r"steps_per_epoch: expected a number of steps",
        ),
        (lambda model: model.compile("sgd", "mse", metrics=[Largest()]) or model.fit(IDS, CLICKS), r"no sum over"),
        (lambda model: model.compile("sgd", "mse", run_eagerly=True) or model.fit(IDS, CLICKS), r"run_eagerly=True"),
    ],
    ids=["no length", "no sum", "eager"],
)
def test_what_cannot_be_fitted_is_refused(fit: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(dflow.TrainingError, match=says):
        fit(dflow.keras.Model(made()))


def test_a_worker_without_a_strategy_is_refused() -> None:
    with memory_cluster() as memory:
        cluster = memory.worker()
        with pytest.raises(dflow.TrainingError, match=r"expected a strategy in a worker of a cluster, got None"):
            dflow.keras.Model(made()).fit(IDS, CLICKS)
        cluster.close()
