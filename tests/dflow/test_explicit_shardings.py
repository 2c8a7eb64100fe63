"""Starts the tests of variables on meshes in a process that has several devices."""

from __future__ import annotations

import pytest

from tests.several_devices import DEADLINE_S, run_there


@pytest.mark.timeout(DEADLINE_S + 30)
def test_in_a_process_of_several_devices() -> None:
    run_there("tests/dflow/explicit_shardings_.py", "tests/dflow/explicit_training_.py")
