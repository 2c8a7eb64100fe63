"""Random programs with state, exported and loaded, give the results of JAX alone."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import dflow
from tests.dflow.test_programs import TIMES, Outcome, meaning
from tests.effort import examples
from tests.programs.draw import programs
from tests.programs.machines import Traced
from tests.programs.made import ARGUMENTS, plain, variables_of
from tests.programs.statements import Program

_numbers = itertools.count()


def by_export(program: Program) -> list[Outcome]:
    """Return the results of each run of the loaded program, and the variables after it."""
    machine = Traced(variables_of(program), [])
    exported = dflow.export({"run": (lambda x, y: program(machine, x, y), *ARGUMENTS)})
    with tempfile.TemporaryDirectory() as folder:
        there = dflow.load(exported.save(Path(folder) / "made"), prefix=f"export_{next(_numbers)}/")
    # Variables that the program does not use are not part of its export.
    variables = [there.variables.get(variable.name, variable) for variable in machine.variables]
    outcomes = []
    for _ in range(TIMES):
        outputs: Any = there.run(*map(jnp.array, ARGUMENTS))
        outcomes.append((plain(outputs), [], plain(variable.read() for variable in variables), []))
    return outcomes


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(8))
@given(program=programs())
def test_an_exported_program_does_what_jax_alone_would_do(program: Program) -> None:
    wanted = meaning(program)
    assert by_export(program) == wanted
