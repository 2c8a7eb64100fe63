"""An accumulator with one user at a time: what the accumulator ops mean.

The reference for tests of every other accumulator, so it is a list of gradients and nothing more. It never waits: a
take that would have to wait is an error of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import AccumulatorError, DeadlineExceeded
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.graph import Node
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.types import AccumulatorType, RowsType


class AccumulatorModel:
    """The gradients that are there, each as the operands of its op; the step, and how many were dropped."""

    def __init__(self, type: AccumulatorType, settings: AccumulatorSettings) -> None:
        self.type, self.settings = type, settings
        self.gradients: list[tuple[Any, ...]] = []
        self.step = self.dropped = self.tickets = 0
        #: The gradients kept aside, each with its step, by ticket.
        self.kept: dict[int, tuple[int, tuple[Any, ...]]] = {}

    def copy(self) -> AccumulatorModel:
        other = AccumulatorModel(self.type, self.settings)
        other.gradients, other.step, other.dropped = list(self.gradients), self.step, self.dropped
        other.tickets, other.kept = self.tickets, dict(self.kept)
        return other

    def use(self, node: Node, operands: Sequence[Any]) -> list[Any]:
        return _MEANINGS[node.op](self, node, operands)

    def apply(self, gradient: tuple[Any, ...], step: int) -> bool:
        """Add a gradient; whether it was fresh. Raises AccumulatorError when there are more rows than a take gives."""
        if step < self.step or len(self.gradients) == self.settings.limit:
            self.dropped += 1
            return False
        together = [*self.gradients, gradient]
        self._check_rows(together)
        self.gradients = together
        return True

    def _check_rows(self, gradients: Sequence[tuple[Any, ...]]) -> None:
        for component, parts in self._by_component(gradients):
            distinct = len(_row_sums(parts)) if isinstance(component, RowsType) else 0
            if isinstance(component, RowsType) and distinct > component.count:
                raise AccumulatorError(f"it would hold {distinct} different rows, but a take gives {component}")

    def take(self, count: int) -> list[Any]:
        """The mean or the sum. Raises DeadlineExceeded when fewer than `count` gradients are there."""
        if len(self.gradients) < count:
            raise DeadlineExceeded(f"a take of {count} waits for ever: it holds {len(self.gradients)}")
        results = self._reduced(self.gradients)
        self.gradients, self.step = [], self.step + 1
        return results

    def keep(self, gradient: tuple[Any, ...], step: int) -> int:
        """Keep a gradient aside; its ticket, or 0 if it is stale."""
        if step < self.step:
            self.dropped += 1
            return 0
        self._advance(step)
        self.tickets += 1
        self.kept[self.tickets] = step, gradient
        return self.tickets

    def take_kept(self, tickets: Sequence[int]) -> list[Any]:
        """The mean or the sum of the kept gradients with these tickets. Raises AccumulatorError unless all are kept."""
        chosen = np.trim_zeros(np.asarray(tickets), "b").tolist()
        if not chosen or len({*chosen}) < len(chosen) or not {*chosen} <= {*self.kept}:
            raise AccumulatorError(f"take_kept: expected distinct tickets of {[*self.kept]}, got {chosen}")
        self._check_rows([self.kept[ticket][1] for ticket in chosen])
        taken = [self.kept.pop(ticket) for ticket in chosen]
        results = self._reduced([gradient for _, gradient in taken])
        self._advance(1 + max(step for step, _ in taken))
        return results

    def _advance(self, step: int) -> None:
        self.step = max(self.step, step)
        left = {ticket: kept for ticket, kept in self.kept.items() if kept[0] >= self.step}
        self.dropped += len(self.kept) - len(left)
        self.kept = left

    def _reduced(self, gradients: Sequence[tuple[Any, ...]]) -> list[Any]:
        divisor = len(gradients) if self.settings.reduction is Reduction.MEAN else None
        results: list[Any] = []
        for component, parts in self._by_component(gradients):
            if isinstance(component, RowsType):
                sums = _row_sums(parts)
                missing = component.count - len(sums)
                results.append(jnp.asarray([*sorted(sums), *[0] * missing], jnp.int32))
                zeros = np.zeros(component.of.shape[1:], component.of.dtype)
                rows = [sums[index] for index in sorted(sums)] + [zeros] * missing
                total: Any = np.stack(rows) if rows else np.zeros((0, *zeros.shape), zeros.dtype)
            else:
                total = sum((np.asarray(part) for (part,) in parts[1:]), np.asarray(parts[0][0]))
            results.append(jnp.asarray(total if divisor is None else total / component.dtype.type(divisor)))
        return results

    def _by_component(self, gradients: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, list[tuple[Any, ...]]]]:
        start = 0
        for component in self.type.components:
            end = start + (2 if isinstance(component, RowsType) else 1)
            yield component, [gradient[start:end] for gradient in gradients]
            start = end


def _row_sums(parts: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
    sums: dict[int, Any] = {}
    for indices, rows in parts:
        if np.shape(indices) == ():
            indices, rows = np.asarray(indices)[None], np.asarray(rows)[None]
        for index, row in zip(np.asarray(indices).tolist(), np.asarray(rows), strict=True):
            sums[index] = sums[index] + row if index in sums else row
    return sums


def _apply(accumulator: AccumulatorModel, node: Node, operands: Sequence[Any]) -> list[Any]:
    *gradient, step = operands
    return [jnp.asarray(accumulator.apply(tuple(gradient), int(step)))]


def _keep(accumulator: AccumulatorModel, node: Node, operands: Sequence[Any]) -> list[Any]:
    *gradient, step = operands
    return [jnp.int32(accumulator.keep(tuple(gradient), int(step)))]


def _take_kept(accumulator: AccumulatorModel, node: Node, operands: Sequence[Any]) -> list[Any]:
    return accumulator.take_kept(np.asarray(operands[0]).tolist())


def _set_step(accumulator: AccumulatorModel, node: Node, operands: Sequence[Any]) -> list[Any]:
    accumulator.step = int(operands[0])
    return []


_MEANINGS: Mapping[OpDef, Callable[[AccumulatorModel, Node, Sequence[Any]], list[Any]]] = {
    ops.accumulator_apply: _apply,
    ops.accumulator_take: lambda accumulator, node, _: accumulator.take(node.attributes["count"]),
    ops.accumulator_keep: _keep,
    ops.accumulator_take_kept: _take_kept,
    ops.accumulator_set_step: _set_step,
    ops.accumulator_step: lambda accumulator, node, _: [jnp.int32(accumulator.step)],
    ops.accumulator_count: lambda accumulator, node, _: [jnp.int32(len(accumulator.gradients))],
    ops.accumulator_dropped: lambda accumulator, node, _: [jnp.int32(accumulator.dropped)],
}
