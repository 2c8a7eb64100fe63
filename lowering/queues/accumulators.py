"""Accumulators shared by threads: an `AccumulatorMachine` with a callback and a deadline for each take, and the sum.

Dense components are summed on their device. Rows are summed by index in host memory, and kept sorted by index. A
gradient kept aside is not added to a sum before its ticket is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.accumulator_machine import AccumulatorMachine, Give
from dflow.lowering.queues.pending_operations import Cancel, Found, OnResults, Rule, SharedResource, Waiter
from dflow.lowering.queues.resource_rules import copied, giving, immediate, property_of
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import AccumulatorError
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import AccumulatorType, RowsType

#: The sum of the gradients since the last take, one tuple per component: an array, or indices and rows.
Sum = list[tuple[Any, ...]]

_add = jax.jit(lambda *arrays: reduce(jnp.add, arrays))


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

    def apply(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """Add a gradient; return whether it was fresh."""
        *parts, number = operands
        gradient, step, fresh = list(map(copied, parts)), int(number), False

        def add() -> list[Give]:
            nonlocal fresh
            fresh = self.machine.is_fresh(step)
            if fresh:
                # Before the machine hands the sum to a take. If this fails, nothing has changed.
                self._sum = self._with(self._sum, [gradient], op.line)
            return self.machine.apply(step)

        self._do(add, op.line)
        return (jnp.asarray(fresh),)

    def keep(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """Keep a gradient aside; return its ticket, or 0 if it is stale."""
        *parts, number = operands
        gradient, step = list(map(copied, parts)), int(number)

        def kept(machine: AccumulatorMachine) -> int:
            ticket = machine.keep(step)
            if ticket:
                self._kept[ticket] = gradient
            self._drop_stale()
            return ticket

        return (jnp.asarray(self.with_machine(kept, op.line), jnp.int32),)

    def take_kept(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
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
        rest = iter(zip(*gradients, strict=True))
        before: Sequence[Any] = [()] * len(self._type.components) if total is None else total
        return [
            self._with_rows(component, [*([old] if old else []), *zip(next(rest), next(rest), strict=True)], where)
            if isinstance(component, RowsType)
            else (_added(*old, *next(rest)),)
            for component, old in zip(self._type.components, before, strict=True)
        ]

    def _with_rows(self, component: RowsType, parts: Sequence[Any], where: str) -> tuple[Any, Any]:
        """Return the indices and rows of a sum, given those of its parts."""
        indices = np.concatenate([np.ravel(part) for part, _ in parts])
        rows = np.concatenate([np.reshape(part, (np.size(at), *component.of.shape[1:])) for at, part in parts])
        distinct, places = np.unique(indices, return_inverse=True)
        if len(distinct) > component.count:
            raise AccumulatorError(
                f"accumulator {self.name!r} would hold {len(distinct)} different rows, but a take gives "
                f"{component}{where}",
                "give its spec more rows, or make that part of it dense",
            )
        total = np.zeros((len(distinct), *rows.shape[1:]), rows.dtype)
        np.add.at(total, places, rows)
        return distinct, total

    def set_step(self, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
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

    def _reduced(self, answer: tuple[Any, ...]) -> list[jax.Array]:
        """Return the results of a take; `answer` is the sum and the number of its gradients."""
        total, count = answer
        divisor = count if self._settings.reduction is Reduction.MEAN else None
        results = []
        for component, part in zip(self._type.components, total, strict=True):
            *indices, values = part
            if isinstance(component, RowsType):
                results.append(jnp.asarray(_padded(indices[0], component.count), jnp.int32))
                values = jnp.asarray(_padded(values, component.count))
            results.append(values if divisor is None else (values / divisor).astype(values.dtype))
        return results

    def _answer(self, command: Give) -> tuple[int, Outcome[Found]]:
        total, self._sum = self._sum, None
        return command.ticket, (total, command.count)

    def _too_late(self, ticket: int, waiter: Waiter) -> str:
        machine = self.machine
        return (
            f"accumulator {self.name!r} could not {waiter.what} within {waiter.timeout_s:g} s; at step {machine.step} "
            f"it holds {machine.count}, and dropped {machine.dropped} that were stale{waiter.where}\n"
            "  are all workers alive, and do they pass the accumulator's step?"
        )

    def _clear(self) -> None:
        self.machine, self._sum, self._kept = AccumulatorMachine(self._settings.limit), None, {}

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


def _added(*arrays: Any) -> Any:
    return _add(*arrays) if len(arrays) > 1 else jnp.asarray(arrays[0])


def _padded(rows: Any, count: int) -> Any:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])
