"""`DFLOW_DUMP` writes the graph after each pass; `DFLOW_CHECK` names the pass that breaks one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflow.lowering.local import METER
from dflow.lowering.pipeline import pipeline

pytestmark = pytest.mark.once

DEADLINE_S = 100.0

SCRIPT = """
import jax.numpy as jnp
import dflow
v = dflow.Variable(jnp.zeros(2), name="v")
@dflow.jit
def step(x):
    v.assign_add(jnp.broadcast_to(x, (2,)))
    return v.read()
step(jnp.ones(2)); step(jnp.ones(2))
step(jnp.float32(1.0))
"""

BREAK = """
import dataclasses, jax.numpy as jnp
import dflow
from dflow.lowering import pipeline
from dflow.tracing.ir.graph import Graph
reverse = lambda graph: Graph(graph.inputs, graph.nodes[::-1], graph.outputs)
pipeline.SIMPLIFY = (pipeline.SIMPLIFY[0]._replace(made_of=reverse),)
print(dflow.jit(lambda x: jnp.sin(x) * 2)(1.0))
"""


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", script]
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_dump_has_one_file_a_pass(tmp_path: Path) -> None:
    ran = python(SCRIPT, DFLOW_DUMP=str(tmp_path), DFLOW_CHECK="1")
    assert ran.returncode == 0, ran.stderr
    folders = sorted(folder.name for folder in tmp_path.iterdir())
    assert folders == ["000-step", "001-step"]
    files = sorted(file.name for file in (tmp_path / "000-step").iterdir())
    stages = ["traced", *(one.name for one in pipeline(costs=METER))]
    assert files == [f"{number:02d}-{stage}.graph" for number, stage in enumerate(stages)]
    traced = (tmp_path / "000-step" / "00-traced.graph").read_text()
    assert "var.assign_add(%v" in traced
    assert traced.startswith("graph(")


def test_a_check_blames_the_pass_that_breaks_a_graph() -> None:
    ran = python(BREAK, DFLOW_CHECK="1")
    assert ran.returncode == 1
    assert "VerifyError" in ran.stderr
    assert "after the pass 'prune'; the graph was valid before it" in ran.stderr
