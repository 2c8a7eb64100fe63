"""`dflow trace --summary` on a running cluster."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import pytest

import dflow
from dflow.cli.cost_tables import show_summary
from dflow.testing import memory_cluster
from tests.dflow.cli.printed import console


@pytest.mark.parametrize("is_written", [False, True])
def test_the_steps_of_a_running_cluster_are_summed_up(tmp_path: Path, is_written: bool) -> None:
    made, file = console(160)
    path = tmp_path / "trace.json" if is_written else None
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = [dflow.Variable(lambda: jnp.ones(4), name=f"w{number}") for number in range(3)]
        step = dflow.jit(lambda: sum(each.read().sum() for each in w))
        step()
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                step()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            show_summary(
                memory.network,
                memory.coordinator.address,
                made,
                steps=3,
                timeout_s=60.0,
                path=path,
                wait=lambda seconds: step(),
            )
        finally:
            is_over.set()
            thread.join()
    lines = file.getvalue().splitlines()
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows if row[:1] in (["ps:0"], ["worker:0"])][:2] == [["ps:0", "3"], ["worker:0", "3"]]
    # Each value begins at a multiple of 64 bytes.
    assert [row[:7] for row in rows if row[:1] == ["w0+2"]] == [["w0+2", "ps:0", "->", "worker:0", "1.0", "3", "144"]]
    assert any(line.startswith("A part of a step now") for line in lines)
    assert lines[-1].startswith(f"{path}: 3 steps of 2 tasks" if is_written else "3 steps of 2 tasks")
    assert (tmp_path / "trace.json").exists() == is_written
    if path is not None:
        assert json.loads(path.read_bytes())["traceEvents"]
