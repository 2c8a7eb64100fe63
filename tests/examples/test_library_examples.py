"""The examples of other libraries, with few steps, in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster
from tests.examples.loading import load
from tests.examples.test_examples import accuracy, numbers, printed

pytestmark = pytest.mark.once


@pytest.mark.parametrize("library", ["linen", "nnx", "haiku", "equinox"])
def test_a_model_of_a_library_learns_digits(library: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    output = printed(f"libraries/with_{library}", "--steps", "40", patch=monkeypatch, output=capsys)
    assert accuracy(output) > 0.3  # by chance 0.1


def test_a_keras_model_with_a_table_learns_and_is_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    file = str(tmp_path / "clicks.keras")
    output = printed("libraries/with_keras", "--steps", "200", "--save", file, patch=monkeypatch, output=capsys)
    [auc] = numbers(r"held-out accuracy .*, AUC (.*)\n", output)
    assert auc > 0.6
    assert keras.models.load_model(file).get_layer("words").input_dim == 2000


def test_the_script_of_the_guide_to_parameter_servers_trains_and_writes_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    output = printed(
        "libraries/keras_parameter_servers", "--working-dir", str(tmp_path), patch=monkeypatch, output=capsys
    )
    losses = numbers(r"losses (\S+) .* (\S+)\n", output)
    assert losses[1] < losses[0]
    assert {"ckpt.keras", "log.csv"} <= {path.name for path in tmp_path.iterdir()}


def test_the_ranking_of_two_synchronous_workers_is_that_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    example = load("libraries/keras_ranking")
    users, films, stars = example.ratings(1000)
    x = {"user": users, "film": films}
    y = {"rating": stars[:, None], "liked": (stars[:, None] >= 4).astype("float32")}
    given = {"batch_size": 128, "epochs": 2, "validation_split": 0.2, "verbose": 0}

    def compiled(wrapped: Any = lambda model: model) -> Any:
        keras.utils.set_random_seed(0)
        model = wrapped(example.make_model(4))
        model.compile(**example.compile_arguments())
        return model

    theirs = compiled()
    keras.utils.set_random_seed(1)
    want = theirs.fit(x, y, **given).history
    with memory_cluster(ps=2, workers=2) as memory, ThreadPoolExecutor(2) as pool:
        workers = [memory.worker(index) for index in range(2)]
        models = [compiled(partial(dflow.keras.Model, strategy=dflow.distributed.Sync(worker))) for worker in workers]
        keras.utils.set_random_seed(1)
        for got in pool.map(lambda model: model.fit(x, y, **given).history, models):
            for name, values in want.items():
                np.testing.assert_allclose(got[name], values, rtol=2e-6, err_msg=name)
        for worker in workers:
            worker.close()
