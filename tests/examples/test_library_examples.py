"""The examples of other libraries and of a vocabulary, with few steps, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflow
from tests.dflow.serving.inference_client import infer
from tests.dflow.serving.small_exports import served
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


def test_names_get_rows_as_they_come_and_are_served(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "recommend"
    output = printed("recommend", "--steps", "60", "--export", str(folder), patch=monkeypatch, output=capsys)
    error, of_mean = numbers(r"held-out error (.*); of the mean (.*)\n", output)
    assert error < 0.3 * of_mean
    users, films, ratings = load("recommend").draw(0)
    loaded = np.asarray(dflow.load(folder)(users, films)["rating"])
    assert np.mean((loaded - ratings)[4:] ** 2) == pytest.approx(error, abs=1e-3)
    with served(folder) as server:
        names = {"user": users, "film": films}
        inputs = [
            {"name": name, "datatype": "BYTES", "shape": [len(column)], "data": column.tolist()}
            for name, column in names.items()
        ]
        status, body, _ = infer(server.url, "recommend", json.dumps({"inputs": inputs}).encode())
    assert status == 200, body
    np.testing.assert_allclose(body["outputs"][0]["data"], loaded, atol=1e-6)
