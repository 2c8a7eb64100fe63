"""An optimizer without a name gets one that every process derives from its variables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.training.optimizer import derived_name
from tests.effort import examples

_PROGRAM = """
import dflow, jax.numpy as jnp, optax
variables = {name: dflow.Variable(jnp.zeros(2), name=name) for name in ("b", "a")}
print(dflow.Optimizer(optax.adam(0.1), variables).slots[0].mu["a"].name)
"""


def of(*names: str) -> list[dflow.Variable]:
    return [dflow.Variable(jnp.zeros(2), name=name) for name in names]


def test_every_process_derives_the_same_name() -> None:
    variables = dict(zip("ba", of("b", "a"), strict=True))
    here = dflow.Optimizer(optax.adam(0.1), variables).slots[0].mu["a"].name
    assert here.startswith("optimizer_")
    assert here.endswith("/0/mu/a")
    there = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert there.stdout.strip() == here


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, unique=True), st.lists(st.sampled_from("abcd"), min_size=1))
def test_names_are_equal_for_equal_variables_alone(one: list[str], other: list[str]) -> None:
    assert (derived_name(of(*one)) == derived_name(of(*other))) is (one == other)


def test_a_second_optimizer_of_the_same_variables_has_a_name_of_its_own() -> None:
    variables = of("w", "b")
    made = [dflow.Optimizer(optax.adam(0.1), variables) for _ in range(3)]
    assert [optimizer.name.removeprefix(made[0].name) for optimizer in made] == ["", "_1", "_2"]
    assert dflow.Optimizer(optax.adam(0.1), of("w", "b")).name == made[0].name


def test_an_optimizer_without_a_name_is_saved_by_its_path_as_before(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.zeros(2), name="w")
    optimizer = dflow.Optimizer(optax.sgd(0.1, momentum=0.9), [w])
    dflow.jit(lambda: optimizer.apply([jnp.ones(2)]))()
    dflow.save(tmp_path / "saved", {"opt": optimizer})
    again = dflow.Optimizer(optax.sgd(0.1, momentum=0.9), of("w"))
    dflow.restore(tmp_path / "saved", {"opt": again})
    (trace,) = jax.tree.leaves(again.slots)
    np.testing.assert_array_equal(trace, [1, 1])
