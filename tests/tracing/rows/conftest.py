"""The variables of these tests."""

from __future__ import annotations

import pytest

import dflow
from tests.tracing.rows.lookup_table import SCALE, TABLE


@pytest.fixture
def table() -> dflow.Variable:
    return dflow.Variable(TABLE, name="table")


@pytest.fixture
def scale() -> dflow.Variable:
    return dflow.Variable(SCALE, name="scale")
