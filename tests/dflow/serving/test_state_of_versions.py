"""State of models and versions whose variables have the same names."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.serving.served_version import ServingSettings
from tests.dflow.serving.inference_client import call, infer, json_request
from tests.dflow.serving.small_exports import learner, served

pytestmark = pytest.mark.once

IDS = dflow.spec("b", jnp.int32)


def plain(rows: int) -> Any:
    """Return a function of row numbers over a variable of `rows` rows, whose values are all `rows`."""
    return dflow.Variable(jnp.full((rows, 2), float(rows)), name="items").gather


def table_of_ids(rows: int) -> Any:
    """Return a function like that of `plain` over a table with a vocabulary."""
    initializer = jax.nn.initializers.constant(rows)
    items = dflow.Embedding(rows, 2, initializer=initializer, name="items", vocabulary=dflow.Vocabulary(bucket=1))
    return lambda ids: items(dflow.WideIds(jnp.zeros(ids.shape, jnp.uint32), ids.astype(jnp.uint32)))


def write(path: Path, fn: Any) -> None:
    """Export a function of row numbers."""

    def look_up(ids: Any) -> Any:
        return fn(ids)

    dflow.export(look_up, IDS).save(path, overwrite=True)


def write_refused(path: Path, rows: int) -> None:
    """Export a function that is refused when its variable has been loaded: the protocol lacks its dtype."""
    items = dflow.Variable(jnp.ones((rows, 2)), name="items")
    dflow.export(lambda x: x * items[0, 0], dflow.spec("b", jnp.complex64)).save(path)


def rows_of(url: str, model: str) -> tuple[str, list[float]]:
    """Return the version that answers, and the row of id 1."""
    status, body, _ = infer(url, model, json_request(ids=np.array([1], np.int32)))
    assert status == 200, body
    return body["model_version"], body["outputs"][0]["data"]


@pytest.mark.parametrize("kind", [plain, table_of_ids])
def test_models_and_versions_have_variables_of_one_name_and_other_shapes(
    kind: Callable[[int], Any], tmp_path: Path
) -> None:
    write(tmp_path / "a" / "1", kind(3))
    write(tmp_path / "b", kind(5))
    with served(tmp_path) as server:
        assert (rows_of(server.url, "a"), rows_of(server.url, "b")) == (("1", [3.0, 3.0]), ("1", [5.0, 5.0]))
        write(tmp_path / "a" / "2", kind(7))
        assert call(server.url, "/v2/repository/models/a/load", b"")[0] == 200
        # Files of a served version that are replaced are loaded beside the earlier ones.
        write(tmp_path / "b", kind(9))
        assert call(server.url, "/v2/repository/models/b/load", b"")[0] == 200
        assert (rows_of(server.url, "a"), rows_of(server.url, "b")) == (("2", [7.0, 7.0]), ("1", [9.0, 9.0]))
        assert not [line for line in server.lines if "refused" in line]  # type: ignore[attr-defined]


def test_a_version_that_is_replaced_or_refused_leaves_no_memory_in_use(tmp_path: Path) -> None:
    def held(rows: int) -> int:
        return sum(array.shape == (rows, 2) for array in jax.live_arrays())

    folder = tmp_path / "a"
    write(folder / "1", plain(331))
    with served(folder) as server:
        write(folder / "2", plain(337))
        write_refused(folder / "3", 347)
        gc.collect()
        assert (held(331), held(337), held(347)) == (1, 0, 0)
        gc.disable()  # memory does not wait for the collector
        try:
            assert "has no such dtype" in call(server.url, "/v2/repository/models/a/load", b"")[1]["error"]
            assert (held(331), held(337), held(347)) == (0, 1, 0)
        finally:
            gc.enable()
        assert rows_of(server.url, "a") == ("2", [337.0, 337.0])


def test_what_a_model_learns_does_not_change_another_of_the_same_names_and_shapes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        learner(tmp_path / name / "1")

    def total(url: str, name: str) -> float:
        value: float = infer(url, f"{name}.total", b'{"inputs":[]}')[1]["outputs"][0]["data"][0]
        return value

    with served(tmp_path, ServingSettings(learn=True), save_every_s=3600) as server:
        for name, number in (("a", 2), ("b", 30), ("a", 5)):
            assert infer(server.url, f"{name}.add", json_request(x=np.float32(number)))[0] == 200
        assert [total(server.url, name) for name in "ab"] == [7.0, 30.0]
    # Each was saved under the names of its export.
    saved = [dflow.load(tmp_path / name / "2") for name in "ab"]
    assert [(list(one.variables), float(one.total())) for one in saved] == [(["total"], 7.0), (["total"], 30.0)]
