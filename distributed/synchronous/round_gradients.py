"""The gradients of a run of synchronous training: each task averages those of its variables, and the host chooses them.

A worker's step sends each gradient to the task that holds its variable. A task other than the host keeps its part of
the gradient aside, and sends the part's ticket to the host. The host adds its own part and the tickets to its
accumulator, if the gradient is among the first of the opening. So every task has the parts of each gradient that the
host adds, even if the worker dies then. In the update the host sends the tickets that it takes, and each task applies
the average of its parts with these tickets. Gradients travel once, and averages do not travel.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from dflow.distributed.collectives.dense_gradients import DenseGradients
from dflow.distributed.synchronous.round_messages import accumulator_on
from dflow.distributed.training.applying import GivenOptimizer, applying
from dflow.distributed.training.strategy import arguments_of
from dflow.tracing.devices.device import device_scope
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.ir.types import RowsType
from dflow.tracing.rows.row_gradient import RowGradient, is_row_gradient
from dflow.tracing.rows.rows_to_dense import dense_to_rows
from dflow.tracing.state.accumulators import ConditionalAccumulator
from dflow.tracing.state.context import default_home, home
from dflow.tracing.state.resources import Variable, is_variable

#: Makes the names of appliers unique, so that a trace under one is never reused for another, even of an equal run name.
_serials = itertools.count()

#: Tickets are the indices of rows, so that a take of the host's accumulator returns them, in order. The ticket 0 of a
#: gradient that a task has not kept would come first, and `take_kept` raises.
_TICKETS = (2**31 - 1,)


class _RoundAccumulator(ConditionalAccumulator):
    """An accumulator of a run, which is not saved: a run that returns to a snapshot makes others."""

    is_saved = False


class OptimizersTogether(GivenOptimizer):
    """The optimizers of one step as one, whose gradients are a tuple of those of each."""

    def __init__(self, optimizers: Sequence[GivenOptimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.name = " and ".join(optimizer.name for optimizer in optimizers)

    @property
    def variables(self) -> Any:
        """The variables of each optimizer."""
        return tuple(optimizer.variables for optimizer in self.optimizers)

    @property
    def settings(self) -> Sequence[str]:
        """The settings of all optimizers, each after its optimizer's name."""
        return [f"{one.name}: {setting}" for one in self.optimizers for setting in one.settings]

    def apply_mean(self, gradients: Any) -> None:
        """Update the variables of each optimizer by its part of the mean of several workers' gradients."""
        for optimizer, part in zip(self.optimizers, gradients, strict=True):
            optimizer.apply_mean(part)


#: Those that steps or runs use, by the identity of the optimizers: equal ones share accumulators and traces.
_together: WeakValueDictionary[tuple[int, ...], OptimizersTogether] = WeakValueDictionary()


def together(optimizers: Sequence[GivenOptimizer]) -> GivenOptimizer:
    """Return several optimizers as one, the same object for the same ones; a single optimizer itself."""
    if len(optimizers) == 1:
        return optimizers[0]
    return _together.setdefault(tuple(map(id, optimizers)), OptimizersTogether(optimizers))


def each_of(optimizer: GivenOptimizer) -> tuple[GivenOptimizer, ...]:
    """Return the optimizers that `together` united in this one; the optimizer itself if it is a single one."""
    return optimizer.optimizers if isinstance(optimizer, OptimizersTogether) else (optimizer,)


@dataclass(frozen=True)
class GradientTypes:
    """The types of a step's gradients, and the task of each.

    host   the task that chooses the gradients of an average
    spec   the pytree of the gradients, of types; an entry without a variable is averaged on the host
    tasks  for each entry, the task that holds its variable
    """

    host: str
    spec: Any
    tasks: tuple[str, ...]

    @staticmethod
    def of(optimizer: GivenOptimizer, spec: Any, host: str) -> GradientTypes:
        """Return the types `spec` of an optimizer's gradients with their tasks."""
        several = each_of(optimizer)
        tasks: list[str] = []
        for one, its_spec in zip(several, spec if len(several) > 1 else [spec], strict=True):
            variables = jax.tree_util.tree_leaves(one.variables, is_leaf=is_variable)
            extra = len(leaves_of(its_spec)) - len(variables)
            tasks += [*(variable.device for variable in variables), *[host] * extra]
        return GradientTypes(host, spec, tuple(tasks))

    @property
    def others(self) -> tuple[str, ...]:
        """The tasks other than the host that hold variables, sorted."""
        return tuple(sorted({*self.tasks} - {self.host}))

    def name(self, optimizer: GivenOptimizer, wanted: int) -> str:
        """Return a name for the host's accumulator of `wanted` gradients; equal names have equal types and tasks."""
        types = [(str(leaf.dtype), tuple(leaf.shape)) for leaf in jax.tree_util.tree_leaves(self._sum(wanted))]
        structure: Any = jax.tree_util.tree_structure(self.spec)
        said = repr((types, str(structure), wanted, [task for task in self.tasks if self.others]))
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        return f"{optimizer.name}/gradients/{short_task_name(self.host)}/{digest}"

    def _sum(self, wanted: int) -> list[Any]:
        return [_sum_type(leaf, wanted) for leaf in leaves_of(self.spec)]

    def accumulators(
        self, name: str, wanted: int, state_of: Callable[[str], AbstractContextManager[None]]
    ) -> dict[str, ConditionalAccumulator]:
        """Make the accumulators of sums of at most `wanted` gradients; return them by task, the host's first.

        name      of the host's accumulator; see `accumulator_on` for the others
        state_of  returns a context that places new state on the tasks of a job
        """
        made: dict[str, ConditionalAccumulator] = {}
        for task in (self.host, *self.others):
            own = self.of_task(task, self._sum(wanted))
            tickets = [_sum_type(_TICKET, wanted) for _ in self.others] if task == self.host else []
            with state_of(split_task_name(task)[0]), device_scope(task):
                made[task] = _RoundAccumulator(
                    (own, tickets), name=name if task == self.host else accumulator_on(task, name), limit=wanted
                )
        return made

    def of_task(self, task: str, leaves: Sequence[Any]) -> list[Any]:
        """Return those of all gradients' `leaves` whose variables are on `task`."""
        return [leaf for leaf, its_task in zip(leaves, self.tasks, strict=True) if its_task == task]

    def together(self, by_task: Mapping[str, Sequence[Any]]) -> Any:
        """Return the pytree of the gradients, given the leaves of each task in the order of `of_task`."""
        rest = {task: iter(leaves) for task, leaves in by_task.items()}
        tree: Any = jax.tree_util.tree_structure(self.spec, is_leaf=is_row_gradient)
        return tree.unflatten([next(rest[task]) for task in self.tasks])


class Gradients:
    """The applier that gives a step's gradients to the accumulators, with the number of the worker's opening."""

    is_look = False

    def __init__(
        self,
        types: GradientTypes,
        accumulators: Mapping[str, ConditionalAccumulator],
        optimizer: GivenOptimizer,
        dense: DenseGradients | None = None,
        *,
        inlines: bool = False,
    ) -> None:
        self.inlines = inlines
        self.types, self._accumulators, self._dense = types, accumulators, dense
        #: By optimizer, its gradients in the step that is traced; None before it has given them.
        self._given: WeakKeyDictionary[GivenOptimizer, Any] = WeakKeyDictionary()
        self._given.update(dict.fromkeys(each_of(optimizer)))
        #: The accumulator of the host.
        self.accumulator = accumulators[types.host]
        self.name = f"{self.accumulator.name} {next(_serials)}"
        with home(default_home()):
            self._round = Variable(lambda: jnp.zeros((), jnp.int32), name=f"{self.name}/round")
            self._is_fresh = Variable(lambda: jnp.zeros((), bool), name=f"{self.name}/is fresh")

    def create(self) -> None:
        """Create the accumulators again, which their tasks freed at the end of a run."""
        for accumulator in self._accumulators.values():
            accumulator.home.create_resource(accumulator)

    def apply(self, optimizer: GivenOptimizer, gradients: Any) -> None:
        """Collect gradients until each optimizer of the step has given its own; then add all to the round's averages.

        Gradients that are too late are dropped. `dense` takes the gradients of its optimizers instead.
        """
        if self._dense is not None and self._dense.takes(optimizer):
            self._dense.apply(optimizer, gradients)
            return
        self._given[optimizer] = gradients
        if any(given is None for given in self._given.values()):
            return  # all go into the average together, or none
        leaves = leaves_of([*self._given.values()])
        self._given.update(dict.fromkeys(self._given))
        number = self._round.read()
        # Ready with the gradients, so that it travels with them, without further messages. With the smallest one,
        # since a gradient computed on another task would be sent here for this. Its sum: the gradient of a table has
        # rows where these are enough.
        smallest = min(jax.tree_util.tree_leaves(leaves), key=np.size)
        _, number = jax.lax.optimization_barrier((jnp.sum(smallest), number))
        tickets = []
        for task in self.types.others:
            ticket = self._accumulators[task].keep((self._fitting(task, leaves), []), number)
            tickets.append(RowGradient(ticket, np.float32(1), _TICKETS))
        own = self._fitting(self.types.host, leaves)
        self._is_fresh.assign(self.accumulator.apply((own, tickets), number))

    def _fitting(self, task: str, leaves: Sequence[Any]) -> list[Any]:
        """Return the gradients of `task` in the form of the components of its accumulator: by rows, or dense."""
        own = self.types.of_task(task, leaves)
        return list(map(_fitting, own, self._accumulators[task].type.components))

    def update(self, optimizer: GivenOptimizer, taken: Sequence[Any]) -> None:
        """Apply the averages of a round: the host's, in `taken`, and those of the tickets in it, from other tasks.

        taken  the arrays that the host's accumulator returned
        """
        own, tickets = self.accumulator.structured(taken)
        means = {self.types.host: own}
        for task, rows in zip(self.types.others, tickets, strict=True):
            means[task], _ = self._accumulators[task].take_kept(rows.indices)
        optimizer.apply_mean(self.types.together(means))

    def call(self, step: Callable[..., Any], batch: Any, number: int) -> tuple[Any, bool]:
        """Run the step for the opening `number` of a round; return its result, and whether its gradients came in time.

        Gradients come in time if the round averages them; see `rounds.py`.
        """
        # By their home: eager operations would take a fifth of the processor time of a small step.
        own = self._round.home
        own.update(self._round, "assign", np.int32(number))
        self._given.update(dict.fromkeys(self._given))  # an earlier trace may have failed
        with applying(self):
            outcome = step(*arguments_of(batch))
        return outcome, bool(np.asarray(own.read(self._is_fresh)))


def leaves_of(gradients: Any) -> list[Any]:
    """Return the leaves of gradients, or of their types; a gradient by rows is one leaf."""
    leaves: list[Any] = jax.tree_util.tree_leaves(gradients, is_leaf=is_row_gradient)
    return leaves


def _fitting(gradient: Any, component: Any) -> Any:
    if is_row_gradient(gradient) or not isinstance(component, RowsType):
        return gradient
    return RowGradient(*dense_to_rows(gradient), gradient.shape)


def _sum_type(part: Any, gradients: int) -> Any:
    """Return the type of a sum of at most `gradients` gradients of the type `part`."""
    if not is_row_gradient(part):
        return part
    count = min(part.indices.shape[0] * gradients, part.shape[0])
    rows = jax.ShapeDtypeStruct((count, *part.rows.shape[1:]), part.rows.dtype)
    return RowGradient(jax.ShapeDtypeStruct((count,), jnp.int32), rows, part.shape)


_TICKET = RowGradient(jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.float32), _TICKETS)
