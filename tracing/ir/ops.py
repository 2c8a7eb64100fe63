"""Every op of our own. Numbers are JAX's; these are state, communication and the calls that passes make.

An op that gives no array gives one `token`, so that each node has a value to be named by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dflow.tracing.errors import GraphTypeError
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.op import OPS, BodySignature, OpDef, op
from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S
from dflow.tracing.ir.row_marks import marks_type
from dflow.tracing.ir.types import AccumulatorType, ArrayType, QueueType, RefType, RowsType, TokenType, Type, strong
from dflow.tracing.ir.updates import KINDS, indices_refusal, kind_refusal, lookup_type, operand_types
from dflow.tracing.ir.wire_codecs import encoded_type
from dflow.tracing.parallel_iterations import DEFAULT_PARALLEL_ITERATIONS


@op("var.read", (Effect.READ, 0))
def var_read(ref: RefType, /) -> tuple[Type, ...]:
    """The value of the variable `ref`."""
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"var.read: the operand is {ref}, not a variable")
    return (ref.of,)


@op("var.gather", (Effect.READ, 0))
def var_gather(ref: RefType, indices: ArrayType, /) -> tuple[Type, ...]:
    """The rows of the variable `ref` at `indices`, which may have any shape."""
    _check_indices("var.gather", ref, indices)
    return (lookup_type(ref.of, indices),)


def _check_indices(name: str, ref: Type, indices: Type) -> None:
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"{name}: the first operand is {ref}, not a variable")
    if not isinstance(indices, ArrayType):
        raise GraphTypeError(f"{name}: the indices are {indices}, not an array")
    refusal = indices_refusal(ref.of, indices)
    if refusal is not None:
        raise GraphTypeError(f"{name}: {refusal}")


def _update(kind: str) -> OpDef:
    """The op of one kind of update. An update of rows takes their indices, then the rows."""
    name = f"var.{kind}"

    def rule(ref: RefType, /, *operands: ArrayType) -> tuple[Type, ...]:
        if not isinstance(ref, RefType):
            raise GraphTypeError(f"{name}: the first operand is {ref}, not a variable")
        refusal = kind_refusal(kind, ref.of)
        if refusal is not None:
            raise GraphTypeError(f"{name}: {refusal}")
        _check_rows(name, ref, operands) if KINDS[kind].by_rows else _check_value(kind, ref, operands)
        return (TokenType(),)

    return op(name, *([(Effect.READ, 0)] if KINDS[kind].reads else []), (Effect.WRITE, 0))(rule)


def _check_value(kind: str, ref: RefType, operands: Sequence[Type]) -> None:
    (value,) = operands
    if not isinstance(value, ArrayType) or value.strong != operand_types(kind, ref.of, [value])[0].strong:
        raise GraphTypeError(f"var.{kind}: the value is {value} but the variable holds {ref.of}")


def _check_rows(name: str, ref: RefType, operands: Sequence[Type]) -> None:
    indices, rows = operands
    _check_indices(name, ref, indices)
    assert isinstance(indices, ArrayType)
    wanted = lookup_type(ref.of, indices)
    if not isinstance(rows, ArrayType) or rows.strong != wanted.strong:
        raise GraphTypeError(f"{name}: the rows are {rows} but {indices} of {ref.of} need {wanted}")


#: The updates of a variable, by their kind: `assign`, `assign_add`, ... `scatter_min`.
UPDATES = {kind: _update(kind) for kind in KINDS}
var_assign, var_assign_add = UPDATES["assign"], UPDATES["assign_add"]


@op("var.mark", (Effect.READ, 0), (Effect.WRITE, 0), (Effect.READ, 1))
def var_mark(marks: RefType, ref: RefType, /, *indices: ArrayType) -> tuple[Type, ...]:
    """Mark the rows of the variable `ref` at `indices` as changed, or all of them without indices.

    It reads the variable, so that it is ordered after the change.
    """
    if not isinstance(ref, RefType):
        raise GraphTypeError(f"var.mark: the second operand is {ref}, not a variable")
    if not ref.of.shape or marks != RefType(marks_type(ref.of.shape[0])):
        raise GraphTypeError(f"var.mark: {marks} are not the marks of {ref}")
    for each in indices:
        _check_indices("var.mark", ref, each)
    return (TokenType(),)


@op("net.send", (Effect.SEND, None))
def net_send(
    *values: ArrayType, edge: str, destination: str, codec: str = "none", fill: int | None = None
) -> tuple[Type, ...]:
    """Send the values, which a `codec` may have made smaller, as one message over `edge` to the task `destination`.

    With `fill` they are an array and the number of its first rows to send; the other rows are `fill`.
    """
    return (TokenType(),)


@op("net.recv", (Effect.RECV, None))
def net_recv(
    *, edge: str, source: str, types: tuple[ArrayType, ...], codec: str = "none", fill: int | None = None
) -> tuple[Type, ...]:
    """The values that the task `source` sends over `edge`."""
    return types


@op("net.encode")
def net_encode(value: ArrayType, /, *, codec: str) -> tuple[Type, ...]:
    """The encoded form of `value`, which is sent."""
    made = encoded_type(codec, value)
    if made is None:
        raise GraphTypeError(f"net.encode: {value} is not made smaller by {codec}")
    return (made,)


@op("net.decode")
def net_decode(sent: ArrayType, /, *, codec: str, type: ArrayType) -> tuple[Type, ...]:
    """The decoded array. It has the given type; its values may have lost precision."""
    _check_given("net.encode", [sent], [encoded_type(codec, type) or type])
    return (type,)


@op("ids.check")
def ids_check(ids: ArrayType, /, *values: Type, size: int, table: str, noun: str = "ids") -> tuple[Type, ...]:
    """The ids and values; an error if an id is not the number of one of the `size` rows of the table of that name.

    `noun` says what they are, for the error.
    """
    return (ids, *values)


@op("dev.copy")
def dev_copy(value: ArrayType, /, *, source: str) -> tuple[Type, ...]:
    """Copy `value` from the device `source` to the node's device. Both are devices of one task."""
    return (value,)


@op("xla.call")
def xla_call(
    *operands: Type, donate: tuple[int, ...] = (), bodies: tuple[BodySignature, ...] = ()
) -> tuple[Type, ...] | None:
    """Run the body as one XLA computation; its results are the body's.

    `donate` lists the operands, all variables, whose buffers the computation may overwrite.
    """
    for body in bodies:
        _check_taken(body, operands)
        return body.gives or (TokenType(),)
    return None


def _check_taken(body: BodySignature, given: Sequence[Type]) -> None:
    if [*map(strong, given)] != [*map(strong, body.takes)]:
        raise GraphTypeError(f"its body takes {body} and was given {BodySignature(tuple(given), ())}")


def _check_given(what: str, given: Sequence[Type], wanted: Sequence[Type]) -> None:
    if [*map(strong, given)] != [*map(strong, wanted)]:
        raise GraphTypeError(f"{what} gives {_listed(given)} where {_listed(wanted)} is wanted")


def _listed(types: Sequence[Type]) -> str:
    return f"({', '.join(map(str, types))})"


# What lies on several tasks says where each of its results is, `homes`; and once it is cut, on which `tasks` it runs:
# each runs its part of the bodies, on the operands that the bodies take there.


@op("ctrl.cond", own_operands=1)
def ctrl_cond(
    index: ArrayType,
    /,
    *operands: Type,
    homes: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    picks: tuple[int, ...] = (),
    bodies: tuple[BodySignature, ...],
) -> tuple[Type, ...]:
    """Run body number `index`, clamped to the range of the bodies.

    After partitioning, the operands numbered `picks` are the copies of the index, one for each task.
    """
    _check_given("the index", [index], [ArrayType(np.dtype("int32"), ())])
    for body in bodies:
        _check_taken(body, operands)
        _check_given("a body", body.gives, bodies[0].gives)
    return bodies[0].gives or (TokenType(),)


@op("ctrl.while")
def ctrl_while(
    *operands: Type,
    carry: int,
    parallel: int = DEFAULT_PARALLEL_ITERATIONS,
    homes: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    bodies: tuple[BodySignature, ...],
) -> tuple[Type, ...]:
    """Run the second body as long as the first gives true. Its results replace the last `carry` operands.

    At most `parallel` iterations run concurrently. After partitioning, the first body gives one copy of its result for
    each task.
    """
    test, body = bodies
    carried = operands[len(operands) - carry :]
    _check_taken(test, operands)
    _check_taken(body, operands)
    _check_given("the test", test.gives, [ArrayType(np.dtype("bool"), ())] * max(1, len(tasks)))
    _check_given("the body", body.gives, carried)
    return body.gives or (TokenType(),)


@op("ctrl.scan")
def ctrl_scan(
    *operands: Type,
    carry: int,
    rows: int,
    length: int,
    reverse: bool = False,
    parallel: int = DEFAULT_PARALLEL_ITERATIONS,
    homes: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    bodies: tuple[BodySignature, ...],
) -> tuple[Type, ...]:
    """Run the body `length` times: the results are the last carry, and the stacked other results of each iteration.

    Each iteration takes one row of each of the last `rows` operands, beginning with the last row if `reverse`. Its
    first results replace the `carry` operands before these. At most `parallel` iterations run concurrently.
    """
    (body,) = bodies
    whole, sliced = operands[: len(operands) - rows], operands[len(operands) - rows :]
    _check_taken(body, (*whole, *(_row(type, length) for type in sliced)))
    _check_given("the body", body.gives[:carry], whole[len(whole) - carry :])
    stacked = tuple(_stacked(type, length) for type in body.gives[carry:])
    return (*body.gives[:carry], *stacked) or (TokenType(),)


def _row(type: Type, length: int) -> Type:
    if not isinstance(type, ArrayType) or type.shape[:1] != (length,):
        raise GraphTypeError(f"a row of {length} is to be taken from {type}")
    return ArrayType(type.dtype, type.shape[1:])


def _stacked(type: Type, length: int) -> Type:
    assert isinstance(type, ArrayType)
    return ArrayType(type.dtype, (length, *type.shape))


_Resource = TypeVar("_Resource", QueueType, AccumulatorType)
_NOUNS = {QueueType: "a queue", AccumulatorType: "an accumulator"}


def _resource(name: str, operand: Type, kind: type[_Resource]) -> _Resource:
    if not isinstance(operand, kind):
        raise GraphTypeError(f"{name}: the first operand is {operand}, not {_NOUNS[kind]}")
    return operand


def _check_components(name: str, queue: Type, given: Sequence[Type], before: tuple[int, ...] = ()) -> None:
    components = _resource(name, queue, QueueType).components
    wanted = [ArrayType(type.dtype, (*before, *type.shape)) for type in components]
    if len(given) != len(wanted) or not all(map(fits, given, wanted)):
        raise GraphTypeError(f"{name}: the element is {_listed(given)} but the queue holds {_listed(wanted)}")


def fits(given: Type, wanted: ArrayType) -> bool:
    """Whether an array fits a component of a queue, which may leave dimensions open."""
    if not isinstance(given, ArrayType) or given.dtype != wanted.dtype or len(given.shape) != len(wanted.shape):
        return False
    return all(dim is None or size == dim for size, dim in zip(given.shape, wanted.shape, strict=True))


def _given_by(name: str, queue: Type, before: tuple[int, ...] = ()) -> tuple[Type, ...]:
    components = _resource(name, queue, QueueType).components
    if any(None in type.shape for type in components):
        raise GraphTypeError(f"{name}: the elements of {queue} have no one shape")
    return tuple(ArrayType(type.dtype, (*before, *type.shape)) for type in components)


@op("queue.enqueue", (Effect.RELEASE, 0))
def queue_enqueue(queue: QueueType, /, *element: ArrayType, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[Type, ...]:
    """Put an element into the queue, waiting for room. It fails on a closed queue."""
    _check_components("queue.enqueue", queue, element)
    return (TokenType(),)


@op("queue.enqueue_many", (Effect.RELEASE, 0))
def queue_enqueue_many(
    queue: QueueType, /, *elements: ArrayType, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[Type, ...]:
    """Put the rows of `elements` into the queue one after the other, waiting for room."""
    _check_components("queue.enqueue_many", queue, elements, elements[0].shape[:1] if elements else ())
    return (TokenType(),)


@op("queue.dequeue", (Effect.ACQUIRE, 0))
def queue_dequeue(queue: QueueType, /, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[Type, ...]:
    """Take an element, waiting for one. It fails on a queue that is closed and empty."""
    return _given_by("queue.dequeue", queue)


@op("queue.dequeue_many", (Effect.ACQUIRE, 0), least_count=0)
def queue_dequeue_many(queue: QueueType, /, *, count: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[Type, ...]:
    """Take `count` elements, stacked. It fails on a closed queue that holds fewer."""
    return _given_by("queue.dequeue_many", queue, (count,))


@op("queue.dequeue_up_to", (Effect.ACQUIRE, 0), least_count=0)
def queue_dequeue_up_to(queue: QueueType, /, *, count: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[Type, ...]:
    """As `dequeue_many`, but a closed queue may give fewer elements, padded with zeros; also gives their number."""
    return (*_given_by("queue.dequeue_up_to", queue, (count,)), ArrayType(np.dtype("int32"), ()))


def _property(name: str, kind: type[_Resource], dtype: str = "int32") -> OpDef:
    """An op that gives a number of a queue or an accumulator, as it is then."""

    def rule(operand: Type, /) -> tuple[Type, ...]:
        _resource(name, operand, kind)
        return (ArrayType(np.dtype(dtype), ()),)

    return op(name, (Effect.ACQUIRE, 0))(rule)


#: The number of elements in a queue, and whether it is closed.
queue_size, queue_is_closed = _property("queue.size", QueueType), _property("queue.is_closed", QueueType, "bool")


@op("queue.close", (Effect.RELEASE, 0))
def queue_close(queue: QueueType, /, *, cancel_pending: bool = False) -> tuple[Type, ...]:
    """Refuse later enqueues; with `cancel_pending`, pending ones fail too."""
    _resource("queue.close", queue, QueueType)
    return (TokenType(),)


def _check_step(name: str, step: Type) -> None:
    if step != ArrayType(np.dtype("int32"), ()):
        raise GraphTypeError(f"{name}: the step is {step}, not i32[]")


@op("accumulator.apply", (Effect.RELEASE, 0))
def accumulator_apply(accumulator: AccumulatorType, /, *operands: ArrayType) -> tuple[Type, ...]:
    """Add a gradient, unless it is stale; return whether it was added.

    The operands are its components, then the number of the step that computed it. A row-sparse component is two
    operands, indices and rows, of any number of rows, or one index and its row.
    """
    _check_gradient("accumulator.apply", accumulator, operands)
    return (ArrayType(np.dtype("bool"), ()),)


@op("accumulator.keep", (Effect.RELEASE, 0))
def accumulator_keep(accumulator: AccumulatorType, /, *operands: ArrayType) -> tuple[Type, ...]:
    """Keep a gradient aside, unless it is stale; return its ticket, or 0. The operands are those of `apply`."""
    _check_gradient("accumulator.keep", accumulator, operands)
    return (ArrayType(np.dtype("int32"), ()),)


@op("accumulator.take_kept", (Effect.ACQUIRE, 0))
def accumulator_take_kept(accumulator: AccumulatorType, tickets: ArrayType, /) -> tuple[Type, ...]:
    """Return the mean or the sum of the kept gradients with these tickets; drop the others. Zeros may follow them."""
    arrays = _resource("accumulator.take_kept", accumulator, AccumulatorType).arrays
    if strong(tickets) != ArrayType(np.dtype("int32"), tickets.shape) or len(tickets.shape) != 1:
        raise GraphTypeError(f"accumulator.take_kept: the tickets are {tickets}, not one row of i32")
    return arrays


def _check_gradient(name: str, accumulator: AccumulatorType, operands: Sequence[ArrayType]) -> None:
    parts = _resource(name, accumulator, AccumulatorType).components
    *given, step = [strong(operand) for operand in operands] or [TokenType()]
    _check_step(name, step)
    if given != _gradient(parts, given):
        raise GraphTypeError(f"{name}: the gradient is {_listed(given)} but {accumulator} is to take it")


def _gradient(parts: Sequence[ArrayType | RowsType], given: Sequence[Type]) -> list[Type]:
    """The types of a gradient; of a row-sparse part as many rows as are given, or the row of one index."""
    wanted: list[Type] = []
    for part in parts:
        if isinstance(part, RowsType):
            indices = given[len(wanted)] if len(wanted) < len(given) else None
            shape = indices.shape[:1] if isinstance(indices, ArrayType) else (0,)
            wanted += [ArrayType(type.dtype, (*shape, *type.shape[1:])) for type in part.arrays(0)]
        else:
            wanted.append(part)
    return wanted


@op("accumulator.take", (Effect.ACQUIRE, 0), least_count=1)
def accumulator_take(
    accumulator: AccumulatorType, /, *, count: int, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[Type, ...]:
    """Wait for `count` gradients; return the mean or the sum of all that are there, and increment the step."""
    return _resource("accumulator.take", accumulator, AccumulatorType).arrays


@op("accumulator.set_step", (Effect.RELEASE, 0))
def accumulator_set_step(accumulator: AccumulatorType, step: ArrayType, /) -> tuple[Type, ...]:
    """Set the step; gradients of earlier ones are stale."""
    _resource("accumulator.set_step", accumulator, AccumulatorType)
    _check_step("accumulator.set_step", strong(step))
    return (TokenType(),)


#: The step, the number of gradients in the accumulator, and the number of stale gradients since the beginning.
accumulator_step = _property("accumulator.step", AccumulatorType)
accumulator_count = _property("accumulator.count", AccumulatorType)
accumulator_dropped = _property("accumulator.dropped", AccumulatorType)


#: The ops on queues and accumulators, by name.
RESOURCE_OPS = {name: definition for name, definition in OPS.items() if definition.is_on_resource}

#: Branches and loops with ops that wait, and so are run by an executor rather than by XLA.
CONTROL_OPS = (ctrl_cond, ctrl_while, ctrl_scan)
LOOPS = (ctrl_while, ctrl_scan)

#: Ops that the host runs itself, between XLA computations.
HOST_OPS = (*RESOURCE_OPS.values(), *CONTROL_OPS)
