"""The benchmark of steps over several devices; `test_several_devices.py` runs it."""

from __future__ import annotations

import pytest

from benchmarks.devices import embedding, halves, refuse_other_losses, rows_of

pytestmark = pytest.mark.once


def test_all_ways_train_alike_and_each_has_a_row() -> None:
    found = rows_of("halves", halves(4, 8, 1), 1)
    found += rows_of("table", embedding(50, 4, 6, 2, 8), 1)
    assert [row["way"] for row in found] == ["dflow", "by hand", "sharded", "one device"] * 2
    assert all(row["ms"] > 0 for row in found)


def test_ways_that_do_not_train_alike_are_not_compared() -> None:
    with pytest.raises(SystemExit, match=r"the losses are \[2.0, 1.0\] on one device and \[2.0, 1.5\] dflow"):
        refuse_other_losses("step", {"dflow": [2.0, 1.5], "one device": [2.0, 1.0]})
    with pytest.raises(SystemExit, match="one device trains nothing"):
        refuse_other_losses("step", {"one device": [2.0, 2.0]})
