"""The queues and accumulators that a task holds for peers.

Why: peers request by messages what to create and which ops to run, and this file checks them. Invariants: a name is
one resource, with the type and settings it was first created with, until it is forgotten; an op reaches a resource
only with operands that match it, whichever peer sent the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import msgspec

from dflow.distributed.steps.plan_checks import MAX_COUNT, MAX_TEXT, check_op
from dflow.distributed.wire.codec import parse_dtype
from dflow.distributed.wire.messages.observing import ResourceDepth
from dflow.distributed.wire.messages.resources import CallResource, CreateResource, FailQueue, Fed, GetFed
from dflow.lowering.queues.accumulators import HeldAccumulator
from dflow.lowering.queues.held_resources import make_resource
from dflow.lowering.queues.pending_operations import Cancel, OnResults, SavedContents
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.plan import Plan, UseResource
from dflow.tracing.errors import AccumulatorError, DflowError, ParseError, QueueError, WireError
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import AccumulatorType, ArrayType, HostType, QueueType, RowsType, array_type_of, parse_type

Held = TypeVar("Held", HeldQueue, HeldAccumulator)


class SavedResource(msgspec.Struct, frozen=True):
    """How a resource was created, and the numbers and the names of the arrays of its `SavedContents`."""

    created: CreateResource
    numbers: dict[str, Any]
    arrays: tuple[str, ...]

    def array_name(self, array: str) -> str:
        """Return the name of an array among those of all state; no variable has a name with the character NUL."""
        return f"{self.created.name}\0{array}"

    def reopened(self) -> SavedResource:
        """Return a copy in which a queue is open and has no failure; an accumulator is unchanged."""
        is_queue = isinstance(self.created.settings, QueueSettings)
        numbers = {**self.numbers, "is_closed": False, "failure": None} if is_queue else self.numbers
        return msgspec.structs.replace(self, numbers=numbers)


class TaskResources:
    """The queues and accumulators in `store` that were made for peers; thread-safe."""

    def __init__(self, task: str, store: Store) -> None:
        self._task, self._store = task, store
        self._lock = threading.Lock()
        self._made: dict[str, _Checked] = {}

    def create(self, message: CreateResource) -> None:
        """Create the resource unless it exists.

        raises  WireError for a malformed request; QueueError or AccumulatorError when the name has another type or
                other settings
        """
        made = _made(message)
        with self._lock:
            known = self._made.get(message.name)
            if known is None:
                self._add(message.name, made)
        if known is not None and known.description != made.description:
            error = AccumulatorError if isinstance(made.type, AccumulatorType) else QueueError
            raise error(
                f"{message.name!r} is {known.description} on {self._task} and was asked for as {made.description}; "
                "give one of the two another name"
            )

    def _add(self, name: str, made: _Checked) -> None:
        self._made[name] = made
        self._store.resources[name] = made

    def saved(self) -> tuple[list[SavedResource], dict[str, Any]]:
        """Return a copy of each resource that is part of snapshots, and their arrays by name."""
        with self._lock:
            made = [checked for checked in self._made.values() if checked.created.is_saved]
        found: list[SavedResource] = []
        arrays: dict[str, Any] = {}
        for checked in made:
            contents = checked.held.saved()
            one = SavedResource(checked.created, dict(contents.numbers), tuple(contents.arrays))
            arrays |= {one.array_name(name): array for name, array in contents.arrays.items()}
            found.append(one)
        return found, arrays

    def return_to(self, saved: Iterable[SavedResource], arrays: Mapping[str, Any]) -> None:
        """Set the contents of the resources to those of `saved`; create resources that do not exist."""
        for one in saved:
            with self._lock:
                checked = self._made.get(one.created.name)
                if checked is None:
                    checked = _made(one.created)
                    self._add(one.created.name, checked)
            own = {name: arrays[one.array_name(name)] for name in one.arrays}
            checked.held.return_to(SavedContents(one.numbers, own))

    def executable(self, message: CallResource) -> Executable:
        """Return a plan of one op: its feeds are the operands, its fetches the results.

        raises  DflowError when no such resource is held here; WireError and GraphTypeError when the op or its operands
                do not match the resource
        """
        held = self._store.resource(message.key)
        if not isinstance(held, _Checked):
            raise DflowError(f"{message.key!r} is no resource that {self._task} holds for others")
        types = [ArrayType(parse_dtype(info.dtype), info.shape) for info in message.operands]
        check_op(message.op)
        takes, results = tuple(range(len(types))), held.results(message.op, types)
        gives = tuple(range(len(takes), len(takes) + results))
        item = UseResource(message.key, message.op, takes, gives)
        return Executable(Plan(self._task, len(takes) + results, (item,), takes, gives))

    def accumulator(self, name: str) -> HeldAccumulator:
        """Return an accumulator that is held here; raises DflowError if there is none of this name."""
        return self._held(name, HeldAccumulator, "accumulator")

    def fed(self, message: GetFed) -> Fed:
        """Return which elements of a feed were put into a queue; then forget them if the message says so.

        raises  DflowError if the queue is not held here
        """
        queue = self._held(message.key, HeldQueue, "queue")
        ranges = queue.fed(message.feed).pairs()
        if message.forget:
            queue.forget_fed(message.feed)
        return Fed(ranges)

    def fail_queue(self, message: FailQueue) -> None:
        """Close a queue because its feed failed; see `HeldQueue.fail`. Raises DflowError if it is not held here."""
        self._held(message.key, HeldQueue, "queue").fail(message.failure, message.fed)

    def _held(self, name: str, kind: type[Held], noun: str) -> Held:
        checked = self._store.resource(name)
        if not isinstance(checked, _Checked) or not isinstance(checked.held, kind):
            raise DflowError(f"{name!r} is no {noun} that {self._task} holds for others")
        return checked.held

    def depths(self) -> tuple[ResourceDepth, ...]:
        """Size and capacity of each resource, sorted by name."""
        with self._lock:
            made = sorted(self._made.items())
        return tuple(ResourceDepth(name, *checked.held.depth()) for name, checked in made)

    def forget(self, name: str, reason: str, remedy: str, error: type[DflowError] | None = None) -> None:
        """Free a resource's contents and its name; does nothing if there is none of this name.

        error  raised by later uses; by default that of the resource
        """
        with self._lock:
            held = self._made.pop(name, None)
        if held is not None:
            held.forget(reason, remedy, error)


ErrorClass: TypeAlias = type[DflowError]
#: At most this many checked kinds of ops are remembered, since peers decide how many there are.
_MOST_KINDS = 256


@dataclass(frozen=True)
class _Checked:
    """A resource that checks each op, since peers send them.

    `description` has its type and settings; `fitting` remembers ops that passed, with the types of their operands.
    """

    created: CreateResource
    held: HeldQueue | HeldAccumulator
    type: HostType
    description: str
    fitting: set[tuple[Any, ...]] = field(default_factory=set)

    @property
    def is_recorded(self) -> bool:
        """Whether a repeated step skips its ops on this resource; see `HeldResource`.

        False for the accumulators of rounds, to which a repeated step sends its gradients again.
        """
        return self.created.is_saved

    def start(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Run an op after checking it; see `HeldQueue.start`."""
        kind = (op.name, op.count, *((operand.dtype, operand.shape) for operand in operands))
        if kind not in self.fitting:
            self.results(op, [array_type_of(operand).strong for operand in operands])
            if len(self.fitting) < _MOST_KINDS:
                self.fitting.add(kind)
        return self.held.start(op, operands, on_results)

    def forget(self, reason: str, remedy: str, error: ErrorClass | None = None) -> None:
        """See `HeldQueue.forget`."""
        self.held.forget(reason, remedy, error)

    def results(self, op: ResourceOp, operands: Sequence[ArrayType]) -> int:
        """Return the number of arrays that the op returns for operands of these types.

        raises  WireError for another number of operands than the op has; GraphTypeError if their types do not match
        """
        definition = ops.RESOURCE_OPS[op.name]
        counted = {} if definition.least_count is None else {"count": op.count}
        try:
            given = definition.rule(self._type_for(operands), *operands, **counted)  # type: ignore[misc]
        except (TypeError, IndexError) as error:
            raise WireError(f"{op.name} on {self.description} was sent {len(operands)} operands: {error}") from error
        return sum(isinstance(type, ArrayType) for type in given)

    def _type_for(self, operands: Sequence[ArrayType]) -> HostType:
        """The type to check an op with; without operands its open dimensions are 0, so that results have a shape."""
        if not isinstance(self.type, QueueType) or operands:
            return self.type
        shapes = [tuple(dim or 0 for dim in component.shape) for component in self.type.components]
        parts = zip(self.type.components, shapes, strict=True)
        return QueueType(tuple(ArrayType(component.dtype, shape) for component, shape in parts))


def _made(message: CreateResource) -> _Checked:
    if not 0 < len(message.name) <= MAX_TEXT:
        raise WireError(f"a resource with a name of {len(message.name)} characters; 1 to {MAX_TEXT} are taken")
    try:
        type = parse_type(message.handle)
    except (ParseError, ValueError) as error:
        raise WireError(f"{message.handle[:MAX_TEXT]!r} is not the type of a queue or an accumulator") from error
    if not isinstance(type, QueueType | AccumulatorType) or not type.components:
        raise WireError(f"a resource of the type {message.handle}")
    match type, message.settings:
        case QueueType(components), QueueSettings() as settings if all(map(_is_array, components)):
            _check_queue(settings, type)
        case AccumulatorType(components), AccumulatorSettings() as settings if all(map(_is_gradient, components)):
            _check_accumulator(settings, type)
        case _:
            raise WireError(f"a resource of the type {message.handle} with {message.settings}")
    held = make_resource(message.name, type, message.settings)
    return _Checked(message, held, type, described(type, message.settings))


def described(type: HostType, settings: QueueSettings | AccumulatorSettings) -> str:
    """Return a resource's type and settings as text, for errors and to compare: equal texts mean the same resource.

    It leaves out the seed of a shuffle queue, which may be random.
    """
    if isinstance(settings, AccumulatorSettings):
        return f"{type}, {settings.reduction.value}" + (f" of at most {settings.limit}" if settings.limit else "")
    least = f", {settings.min_after_dequeue} held back" if settings.min_after_dequeue else ""
    return f"{settings.kind.value} {type}, capacity {settings.capacity}{least}"


def _check_queue(settings: QueueSettings, type: QueueType) -> None:
    if not 1 <= settings.capacity <= MAX_COUNT:
        raise WireError(f"a queue of capacity {settings.capacity}; 1 to {MAX_COUNT} are taken")
    if not 0 <= settings.min_after_dequeue < settings.capacity:
        raise WireError(f"a queue of capacity {settings.capacity} that holds {settings.min_after_dequeue} back")
    first = type.components[0]
    if settings.kind is QueueKind.PRIORITY and (first.shape != () or first.dtype.name not in ("int32", "int64")):
        raise WireError(f"a priority queue whose first component is {first}; its priority is an int32 or int64 scalar")


def _check_accumulator(settings: AccumulatorSettings, type: AccumulatorType) -> None:
    is_mean = settings.reduction is Reduction.MEAN
    if is_mean and not all(jnp.issubdtype(part.dtype, jnp.inexact) for part in type.components):
        raise WireError(f"an accumulator of the mean of {type}, which has whole numbers")
    if settings.limit is not None and not 1 <= settings.limit <= MAX_COUNT:
        raise WireError(f"an accumulator of at most {settings.limit} gradients; 1 to {MAX_COUNT} are taken")


def _is_array(part: ArrayType) -> bool:
    """Whether this is the type of an array that can be sent."""
    return not part.weak and not jnp.issubdtype(part.dtype, jax.dtypes.extended)


def _is_gradient(part: ArrayType | RowsType) -> bool:
    whole = part.of if isinstance(part, RowsType) else part
    return _is_array(whole) and None not in whole.shape and (whole is part or len(whole.shape) > 0)
