"""Accumulators shared by threads: an `AccumulatorMachine` with a callback and a deadline for each take, and the sum.

Dense components are summed on their device, all of a gradient by one program: a call of JAX for each would take longer
than to add them. Rows are summed by index in host memory, and kept sorted by index. Sums are of at least float32, and a
take rounds its result to the component's dtype. A gradient kept aside is not added
to a sum before its ticket is taken. Each gradient is copied, since its owner may change it, unless the op owns its
operands (`ResourceOp.owned`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.accumulator_machine import AccumulatorMachine, Give
from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.pending_operations import (
    Cancel,
    Found,
    OnResults,
    Rule,
    SavedContents,
    SharedResource,
    Waiter,
)
from dflow.lowering.queues.resource_rules import copied, giving, immediate, property_of
from dflow.lowering.values.host_values import as_operand, may_stay_on_host
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import AccumulatorError
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import AccumulatorType, RowsType
from dflow.tracing.ir.wide_sums import sum_dtype

#: The sum of the gradients since the last take, one tuple per component: an array, or indices and rows.
Sum = list[tuple[Any, ...]]

_sums = jax.jit(lambda totals, arrays: list(map(jnp.add, map(_wide, totals), map(_wide, arrays))))
_means = jax.jit(lambda totals, count: [(total / count).astype(total.dtype) for total in totals])


class HeldAccumulator(SharedResource):
    """An accumulator of gradients. Every method may be called from any thread."""

    kind = "accumulator"
    error = AccumulatorError
    machine: AccumulatorMachine

    def __init__(self, name: str, settings: AccumulatorSettings, type: AccumulatorType) -> None:
        super().__init__()
        self.name = name
        self._settings, self._type = settings, type
        self.machine = AccumulatorMachine(settings.limit)
        self._sum: Sum | None = None
        #: By giver, the newest step that a gradient of it was added for.
        self._given: dict[str, int] = {}
        #: The operands of the gradients kept aside, by ticket.
        self._kept: dict[int, Sequence[Any]] = {}

    def take(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Give the reduction of `op.count` gradients or more, as soon as they are there; see `start`."""
        what = f"give {op.count} gradient{'s' if op.count != 1 else ''}"
        waiter = Waiter(what, giving(on_results, self._reduced), op.timeout_s, op.line)
        return self._ask(waiter, lambda ticket: self.machine.take(ticket, op.count))

    def set_enough(self, count: int) -> None:
        """Let `count` gradients suffice for takes that want more, including pending ones."""
        self._do(lambda: self.machine.set_enough(count), "")

    def depth(self) -> tuple[int, int]:
        """Return the number of gradients that it holds, and the limit of the number in a sum, or 0 without a limit."""
        with self._lock:
            return self.machine.count + len(self._kept), self._settings.limit or 0

    def contents(self) -> tuple[Any, ...]:
        """Return the step, the numbers of gradients summed and dropped, and the arrays of the sum."""
        with self._lock:
            machine, total = self.machine, self._sum or []
            return machine.step, machine.count, machine.dropped, [np.array(array) for part in total for array in part]

    def saved(self) -> SavedContents:
        with self._lock:
            numbers, total, kept = self.machine.saved(), self._sum, dict(self._kept)
        parts = {f"sum {index}": part for index, part in enumerate(total or ())}
        parts |= {f"gradient {ticket}": tuple(gradient) for ticket, gradient in kept.items()}
        arrays = {f"{name} {number}": array for name, part in parts.items() for number, array in enumerate(part)}
        return SavedContents({**numbers, "parts": {name: len(part) for name, part in parts.items()}}, arrays)

    def return_to(self, saved: SavedContents) -> None:
        numbers, sizes = saved.numbers, saved.numbers["parts"]
        parts = {name: tuple(saved.arrays[f"{name} {k}"] for k in range(size)) for name, size in sizes.items()}

        def act() -> list[Give]:
            self._sum = (
                [parts[f"sum {index}"] for index in range(len(self._type.components))] if numbers["count"] else None
            )
            self._kept = {ticket: parts[f"gradient {ticket}"] for ticket, _ in numbers["kept"]}
            return self.machine.return_to(numbers)

        self._do(act, "")

    def apply(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[Sent]:
        """Add a gradient; return whether it was fresh. A second one of a giver for a step is taken for the first."""
        *gradient, number = _owned(op, operands)
        step, fresh = int(number), False

        def add() -> list[Give]:
            nonlocal fresh
            if op.giver and step >= self.machine.step and self._given.get(op.giver) == step:
                fresh = True
                return []
            fresh = self.machine.is_fresh(step)
            if fresh:
                # Before the machine hands the sum to a take. If this fails, nothing has changed.
                self._sum = self._with(self._sum, [gradient], op.line)
                if op.giver:
                    self._given[op.giver] = step
            return self.machine.apply(step)

        self._do(add, op.line)
        return (np.asarray(fresh),)

    def keep(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[Sent]:
        """Keep a gradient aside; return its ticket, or 0 if it is stale."""
        *gradient, number = _owned(op, operands)
        step = int(number)

        def kept(machine: AccumulatorMachine) -> int:
            ticket = machine.keep(step)
            if ticket:
                self._kept[ticket] = gradient
            self._drop_stale()
            return ticket

        return (np.asarray(self.with_machine(kept, op.line), np.int32),)

    def take_kept(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[Sent]:
        """Return the reduction of the kept gradients with the tickets given; drop the others of their step."""
        tickets = np.trim_zeros(np.asarray(operands[0]), "b").tolist()

        def taken(machine: AccumulatorMachine) -> Sum:
            total = self._sum_of(tickets, op.line)
            machine.take_kept(tickets)
            self._drop_stale()
            return total

        return self._reduced((self.with_machine(taken, op.line), len(tickets)))

    def _sum_of(self, tickets: Sequence[int], where: str) -> Sum:
        """Return the sum of the kept gradients with these tickets. The lock is held."""
        strangers = [ticket for ticket in tickets if ticket not in self._kept]
        if strangers or not tickets or len({*tickets}) < len(tickets):
            raise AccumulatorError(
                f"accumulator {self.name!r}: take_kept: expected different tickets of kept gradients, got "
                f"{strangers or tickets}{where}",
                "pass tickets that `keep` returned, each once, before a gradient of a later step is kept or taken",
            )
        return self._with(None, [self._kept[ticket] for ticket in tickets], where)

    def _drop_stale(self) -> None:
        """Free the gradients that the machine keeps no longer. The lock is held."""
        self._kept = {ticket: self._kept[ticket] for ticket in self.machine.kept}

    def _with(self, total: Sum | None, gradients: Sequence[Sequence[Any]], where: str) -> Sum:
        """Return the sum with some gradients added; of these alone, if `total` is None."""
        sums = [total] if total is not None else []
        sums += [self._by_component(gradient) for gradient in gradients]
        dense = [index for index, component in enumerate(self._type.components) if not isinstance(component, RowsType)]
        added, *others = [[part[index][0] for index in dense] for part in sums]
        for other in others:
            added = _in_one_program(_sums, added, other)
        arrays = iter(added)
        return [
            self._with_rows(component, [part[index] for part in sums], where)
            if isinstance(component, RowsType)
            else (next(arrays),)
            for index, component in enumerate(self._type.components)
        ]

    def _by_component(self, gradient: Sequence[Any]) -> Sum:
        """Return the operands of a gradient by component."""
        rest = iter(gradient)
        return [
            (next(rest), next(rest)) if isinstance(component, RowsType) else (next(rest),)
            for component in self._type.components
        ]

    def _with_rows(self, component: RowsType, parts: Sequence[Any], where: str) -> tuple[Any, Any]:
        """Return the indices and rows of a sum, given those of its parts."""
        # NumPy's functions would have JAX reshape its arrays, which takes ten times as long.
        arrays = [
            _existing(
                component, np.asarray(at).reshape(-1), np.asarray(part).reshape(np.size(at), *component.of.shape[1:])
            )
            for at, part in parts
        ]
        distinct, positions = np.unique(np.concatenate([at for at, _ in arrays]), return_inverse=True)
        if len(distinct) > component.count:
            raise AccumulatorError(
                f"accumulator {self.name!r} would hold {len(distinct)} different rows, but a take gives "
                f"{component}{where}",
                "give its spec more rows, or make that part of it dense",
            )
        total = np.zeros((len(distinct), *component.of.shape[1:]), sum_dtype(component.of.dtype))
        for own, (_, rows) in zip(
            np.split(positions, np.cumsum([len(at) for at, _ in arrays[:-1]])), arrays, strict=True
        ):
            if np.bincount(own, minlength=1).max() == 1:
                total[own] += rows  # a tenth of the time of `np.add.at`, which may meet an index twice
            else:
                np.add.at(total, own, rows.astype(total.dtype))
        return distinct, total

    def set_step(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[Sent]:
        """Set the step; warn if it is set back."""
        step = int(operands[0])
        before = self.with_machine(lambda machine: machine.set_step(step), op.line)
        if step < before:
            warnings.warn(
                f"accumulator {self.name!r} goes back from step {before} to {step}: gradients that were stale "
                f"are taken again{op.line}",
                stacklevel=2,
            )
        return ()

    def _reduced(self, answer: tuple[Any, ...]) -> list[Any]:
        """Return the results of a take; `answer` is the sum and the number of its gradients."""
        total, count = answer
        values = [part[-1] for part in total]  # dense arrays, and the rows of components of indices and rows
        for index, component in enumerate(self._type.components):
            if isinstance(component, RowsType):
                values[index] = as_operand(_padded(values[index], component.count))
        if count > 1 and self._settings.reduction is Reduction.MEAN:
            values = _in_one_program(lambda totals: _means(totals, count), values)
        dtypes = [part.dtype for part in self._type.components]
        values = [_rounded(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
        results = []
        for component, part, value in zip(self._type.components, total, values, strict=True):
            if isinstance(component, RowsType):
                results.append(as_operand(_padded(part[0], component.count).astype(np.int32)))
            results.append(value)
        return results

    def _answer(self, command: Give) -> tuple[int, Outcome[Found]]:
        ticket, count = command
        total, self._sum = self._sum, None
        return ticket, (total, count)

    def _too_late(self, ticket: int, waiter: Waiter) -> str:
        machine = self.machine
        return (
            f"accumulator {self.name!r} could not {waiter.what} within {waiter.timeout_s:g} s; at step {machine.step} "
            f"it holds {machine.count}, and dropped {machine.dropped} that were stale{waiter.where}\n"
            "  are all workers alive, and do they pass the accumulator's step?"
        )

    def _clear(self) -> None:
        self.machine, self._sum = AccumulatorMachine(self._settings.limit), None
        self._kept, self._given = {}, {}

    rules: ClassVar[Mapping[str, Rule]] = {
        ops.accumulator_apply.name: immediate(apply),
        ops.accumulator_take.name: take,
        ops.accumulator_keep.name: immediate(keep),
        ops.accumulator_take_kept.name: immediate(take_kept),
        ops.accumulator_set_step.name: immediate(set_step),
        ops.accumulator_step.name: property_of(lambda machine: machine.step, jnp.int32),
        ops.accumulator_count.name: property_of(lambda machine: machine.count, jnp.int32),
        ops.accumulator_dropped.name: property_of(lambda machine: machine.dropped, jnp.int32),
    }


def _owned(op: ResourceOp, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of `op`, copied unless they are owned."""
    return operands if op.owned else list(map(_copied, operands))


def _copied(array: Any) -> Any:
    """Return `copied(array)`, but of a large NumPy array on a CPU a NumPy array: JAX would take longer to copy it."""
    stays = isinstance(array, np.ndarray) and may_stay_on_host(array.dtype, array.nbytes)
    return np.array(array) if stays else copied(array)


def _in_one_program(fn: Callable[..., list[Any]], *lists: Sequence[Any]) -> list[Any]:
    """Return `fn(*lists)`, of lists of components; for each component alone if they are on several devices."""
    components = list(zip(*lists, strict=True))
    if not components:
        return []
    shardings = {
        next((array.sharding for array in arrays if isinstance(array, jax.Array)), None) for arrays in components
    }
    if len(shardings) <= 1:
        return fn(*lists)
    return [fn(*([array] for array in arrays))[0] for arrays in components]


def _existing(component: RowsType, indices: Any, rows: Any) -> tuple[Any, Any]:
    """Return the indices and rows without those past the end, as gradients of lookups have at positions left over."""
    is_row = indices < component.of.shape[0]
    return (indices, rows) if is_row.all() else (indices[is_row], rows[is_row])


def _wide(array: Any) -> Any:
    return array.astype(sum_dtype(array.dtype))


def _rounded(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else value.astype(dtype)


def _padded(rows: Any, count: int) -> Any:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])
