"""The examples of other libraries, with few steps, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
