"""Checkpoints and exports of tables with a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflow
from tests.dflow.tables.vocabulary_program import GrowingTable

pytestmark = pytest.mark.once

CONFIG = dflow.Vocabulary("lru", 2, bucket=2)


def batches(count: int, seed: int) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 30, 6) for _ in range(count)]


@pytest.fixture(scope="module")
def trained() -> GrowingTable:
    with dflow.container("first"):
        made = GrowingTable(CONFIG, 20, shards=2, name="saved")
    for ids in batches(12, 0):
        made.train(ids)
    return made


def trained_on(made: GrowingTable) -> list[Any]:
    return [(made.table(ids), made.train(ids), made.owners()) for ids in batches(8, 2)]


def test_training_goes_on_after_a_restore_onto_other_shards(trained: GrowingTable, tmp_path: Path) -> None:
    dflow.save(tmp_path / "saved", {"table": trained.table, "optimizer": trained.optimizer})
    with dflow.container("second"):
        other = GrowingTable(CONFIG, 20, shards=1, name="saved")
    for ids in batches(3, 1):
        other.train(ids)
    state = {"table": other.table, "optimizer": other.optimizer}
    report = dflow.restore(tmp_path / "saved", state, names=lambda name: name.replace("second/", "first/"))
    own = {f"first/saved{kind}" for kind in ("", "/ids", "/born", "/seen", "/sightings")}
    assert {*report.restored} == own | {"first/saved/optimizer/0/sum_of_squares/saved"}
    evicted = trained.table.counts().evicted
    for (rows, after, owners), (others, others_after, other_owners) in zip(
        trained_on(trained), trained_on(other), strict=True
    ):
        np.testing.assert_allclose(rows, others, rtol=1e-6)
        np.testing.assert_allclose(after, others_after, rtol=1e-6)
        assert owners == other_owners
    assert trained.table.counts().evicted > evicted
