"""Values of 64 bits: a process that runs others' programs starts to keep them; in other processes they are an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.programs.program import export_program, load_program
from dflow.lowering.queues.held_resources import make_resource
from dflow.lowering.state.store import Store
from dflow.lowering.values.wide_types import following_programs
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import ArrayType, QueueType

WIDE, NARROW = (ArrayType(np.dtype(dtype), ()) for dtype in ("float64", "float32"))


@pytest.fixture
def task() -> Iterator[None]:
    with following_programs():
        yield
    jax.config.update("jax_enable_x64", False)


def program(type: ArrayType) -> bytes:
    with jax.enable_x64(True):
        return export_program(lambda value: [value + value], [type])


GIVEN: dict[str, Callable[[ArrayType], object]] = {
    "variable": lambda type: Store().create("w", type, lambda: np.ones((), type.dtype)),
    "program": lambda type: load_program(program(type), 0),
    "queue": lambda type: make_resource("q", QueueType((type,)), QueueSettings(QueueKind.FIFO, 1)),
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.usefixtures("task")
def test_a_task_keeps_64_bits_with_the_first_value_that_has_them(kind: str) -> None:
    GIVEN[kind](NARROW)
    assert not jax.config.read("jax_enable_x64")
    GIVEN[kind](WIDE)
    [result] = load_program(program(WIDE), 0)(jnp.asarray(np.float64(1) / 3))
    assert float(result) == 2 / 3


def test_other_processes_say_what_to_do() -> None:
    fact = r"initial value of variable 'w' is f32\[\], but it is to hold f64\[\](.|\n)*set JAX_ENABLE_X64=1 in the env"
    with pytest.raises(VariableError, match=fact):
        GIVEN["variable"](WIDE)
    assert not jax.config.read("jax_enable_x64")
