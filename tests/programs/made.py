"""Variables, queues, an accumulator and cells for a program, and their contents for comparisons."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.state_backends import LOCAL
from dflow.tracing.ir.queue_settings import QueueKind
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.state.accumulators import ConditionalAccumulator
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.queues import FIFOQueue, PriorityQueue, Queue, RandomShuffleQueue
from dflow.tracing.state.resources import Variable
from tests.programs.draw import CAPACITY, FULL, HELD_BACK
from tests.programs.reference import AccumulatorCell, Cell, QueueCell
from tests.programs.statements import Program
from tests.reference.accumulator_model import AccumulatorModel
from tests.reference.queue_model import QueueModel

#: The arguments that programs are run on.
ARGUMENTS = (np.array([1, -2, 3], np.float32), np.array([0, 5, -7], np.float32))

_SPEC = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32))


def initial_values(program: Program) -> list[jax.Array]:
    """Initial values of the variables, all different."""
    return [
        (jnp.arange(int(np.prod(shape)), dtype=jnp.float32).reshape(shape) * (number + 1) % 7).astype(dtype)
        for number, (dtype, shape) in enumerate(program.types)
    ]


def variables_of(program: Program) -> list[Variable]:
    """New variables. Their names contain their types, since those of an earlier program may exist for a while."""
    types = ["_".join(map(str, (dtype, *shape))) for dtype, shape in program.types]
    values = enumerate(zip(types, initial_values(program), strict=True))
    return [Variable(value, name=f"v{number}/{type}") for number, (type, value) in values]


def cells_of(program: Program) -> list[Cell]:
    return [Cell(value) for value in initial_values(program)]


def queues_of(program: Program) -> list[Queue]:
    made: list[Queue] = []
    for number, kind in enumerate(program.queues):
        name = f"q{number}"
        match kind:
            case QueueKind.FIFO:
                made.append(FIFOQueue(CAPACITY, _SPEC, name=name))
            case QueueKind.PRIORITY:
                made.append(PriorityQueue(CAPACITY, _SPEC, name=name))
            case QueueKind.SHUFFLE:
                made.append(RandomShuffleQueue(CAPACITY, HELD_BACK, _SPEC, seed=7, name=name))
        for element in first_elements():
            made[-1].enqueue(element)
    return made


def accumulator_of(program: Program) -> ConditionalAccumulator | None:
    if not program.accumulates:
        return None
    rows = RowGradient(jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 1), jnp.int32), (5, 1))
    return ConditionalAccumulator((jax.ShapeDtypeStruct((3,), jnp.int32), rows), name="gradients", reduction="sum")


def model_of(resource: HostResource) -> QueueModel | AccumulatorModel:
    if isinstance(resource, Queue):
        return QueueModel(resource.settings, first_elements())
    assert isinstance(resource, ConditionalAccumulator)
    return AccumulatorModel(resource.type, resource.settings)


def cells_of_queues(program: Program) -> list[QueueCell]:
    return [QueueCell(QueueModel(queue.settings, first_elements())) for queue in queues_of(program)]


def cell_of_accumulator(program: Program) -> AccumulatorCell | None:
    accumulator = accumulator_of(program)
    return accumulator and AccumulatorCell(AccumulatorModel(accumulator.type, accumulator.settings))


def first_elements() -> list[tuple[Any, Any]]:
    return [(np.int32(5 - 3 * n), np.array([n, 10 * n], np.int32)) for n in range(FULL)]


def plain(values: Any) -> list[Any]:
    """Convert to numbers that can be compared."""
    return [np.asarray(value).tolist() for value in values]


def contents(resource: HostResource) -> list[Any]:
    """Return the elements of a queue in order; of an accumulator its numbers."""
    if isinstance(resource, ConditionalAccumulator):
        return plain([resource.step, resource.count(), resource.dropped()])
    return [plain(element) for element in LOCAL.store.resource(resource.key).contents()]


def contents_of_model(model: QueueModel | AccumulatorModel) -> list[Any]:
    if isinstance(model, AccumulatorModel):
        return [model.step, len(model.gradients), model.dropped]
    return [plain(element) for element in model.elements]
