"""GPU memory grows on demand, and its limit is set in time or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow

DEADLINE_S = 60.0

#: Prints the memory settings that JAX would use for a GPU.
OPTIONS = """
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
options = generate_pjrt_gpu_plugin_options()
print(options.get("preallocate"), options.get("memory_fraction"))
"""


def python(script: str, **environment: str) -> str:
    """Run a script in a new Python, with only the given settings of GPU memory, and return its output."""
    inherited = {name: value for name, value in os.environ.items() if "XLA" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_memory_grows_on_demand_once_dflow_is_imported() -> None:
    assert python(OPTIONS) == "None None"
    assert python("import dflow" + OPTIONS) == "False None"


def test_what_the_user_has_set_stays() -> None:
    assert python("import dflow" + OPTIONS, XLA_PYTHON_CLIENT_PREALLOCATE="true") == "True None"


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_limit_takes_the_place_of_what_the_environment_says(name: str) -> None:
    script = "import dflow; dflow.configure(memory_fraction=0.9); dflow.configure(memory_fraction=0.25)"
    assert python(script + OPTIONS, **{name: "0.5"}) == "False 0.25"


def test_a_limit_that_comes_after_a_variable_is_refused() -> None:
    script = """
import os, dflow
dflow.Variable(1.0)
try:
    dflow.configure(memory_fraction=0.5)
except dflow.ConfigError as error:
    print(error)
print("XLA_CLIENT_MEM_FRACTION" in os.environ)
"""
    said = python(script, JAX_PLATFORMS="cpu")
    assert "memory_fraction=0.5 comes too late: JAX has started" in said
    assert "\n  at <string>:5\n  call dflow.configure before the first array or variable is made" in said
    assert said.endswith("False")


def test_a_limit_that_comes_after_the_devices_is_refused() -> None:
    assert jax.devices()
    with pytest.raises(dflow.ConfigError, match=r"memory_fraction=0\.5 comes too late: JAX has started"):
        dflow.configure(memory_fraction=0.5)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan"), True, "0.5", None], ids=str)
def test_a_limit_is_a_part_of_the_memory(fraction: Any) -> None:
    assert jnp.ones(1).shape == (1,)
    with pytest.raises(dflow.ConfigError, match=r"memory_fraction is .*\n  at .*\n  give a part of a GPU's memory"):
        dflow.configure(memory_fraction=fraction)
