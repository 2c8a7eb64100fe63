"""A traced function over variables of a cluster, as a plan for each task; it can be lowered to text, and registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from dflow.lowering.programs.program import LoweredProgram, lower_program
from dflow.lowering.state.store import Store
from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.lowering.steps.local_step import lower_programs
from dflow.lowering.steps.lowered import Lowered
from dflow.lowering.steps.plan import Plan
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError
from dflow.tracing.jaxprs.trace import Traced


@dataclass(frozen=True)
class PartitionedStep:
    """The plans of a traced function by task, this task's first.

    `literals` are the literals that the function returns, `store` has this task's variables, and `register` registers
    the plans with all tasks, given the lowered programs of this one.
    """

    traced: Traced
    plans: Mapping[str, Lowered]
    literals: Sequence[jax.Array]
    store: Store
    register: Callable[[PartitionedStep, Sequence[LoweredProgram]], Runner]

    def own(self, platforms: tuple[str, ...] | None = None) -> list[LoweredProgram]:
        """Lower the programs of this task."""
        traced, mine = self.traced, next(iter(self.plans.values()))
        given_up = [len(traced.constants) + leaf for leaf in traced.donated]
        return lower_programs(mine, self.store, given_up, traced.name, platforms=platforms, meshes=traced.meshes)

    def lower(self, platforms: tuple[str, ...] | None = None) -> LoweredStep:
        """Lower the programs of all tasks, for `platforms` if not None, else for this process's devices."""
        own, (mine, *others) = self.own(platforms), self.plans.values()
        parts = [LoweredPart(mine.plan, [program.stage for program in own])]
        for part in sorted(others, key=lambda part: part.plan.task):
            parts.append(LoweredPart(part.plan, self._stages(part, platforms)))
        return LoweredStep(parts, partial(self._compiled, own, platforms))

    def _stages(self, part: Lowered, platforms: tuple[str, ...] | None) -> list[jax.stages.Lowered]:
        return [
            lower_program(
                pure.fn, pure.types, len(pure.written), len(pure.read), name=self.traced.name, platforms=platforms
            ).stage
            for pure in part.functions
        ]

    def _compiled(
        self, own: Sequence[LoweredProgram], platforms: tuple[str, ...] | None, options: dict[str, Any] | None
    ) -> tuple[Runner, None]:
        """Register the plans with their tasks, which compile their programs. Raises DflowError for options."""
        if options:
            raise no_options(self.traced.name)
        if platforms is not None:
            raise DflowError(
                f"{self.traced.name} was lowered for {', '.join(platforms)}, and each task compiles for its own "
                f"platform",
                "lower it without lowering_platforms",
            )
        return self.register(self, own), None


@dataclass(frozen=True)
class LoweredPart:
    """A task's part of a step: its plan and its programs, with the methods of JAX's `Lowered`."""

    plan: Plan
    stages: Sequence[jax.stages.Lowered]

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the name of the task and the items of its plan, as comments, then its programs."""
        items = [f"//   {item!r}" for item in self.plan.items]
        texts = [stage.as_text(dialect, debug_info=debug_info) for stage in self.stages]
        return "\n".join([f"// {short_task_name(self.plan.task)}", *items, *texts])

    def cost_analysis(self) -> Mapping[str, float]:
        """Return XLA's estimates, summed over the programs."""
        total: Counter[str] = Counter()
        for stage in self.stages:
            total.update(stage.cost_analysis() or {})
        return total


def no_options(name: str) -> DflowError:
    """Return the error for compiler options, which do not reach the tasks that compile."""
    return DflowError(
        f"{name} has variables on other tasks, which compile for themselves, so it takes no compiler_options",
        "set XLA_FLAGS where the tasks are started",
    )
