"""`dflow.evaluate`: metrics over batches, from the variables' values of one moment, while training goes on.

The step is traced once for each type of batch, and its variables become arguments. It gets their captured values, so
what training writes meanwhile is in none of the results. Means are weighted by examples, states of other metrics are
merged, and both are added up as 64-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import jit as jax_jit

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.evaluation.shared_evaluation import Evaluations
from dflow.distributed.training.metric_states import computed, is_state, named_results, on_host
from dflow.distributed.training.strategy import arguments_of
from dflow.input.numpy_batches import NumpyBatches
from dflow.state_backends import by_backend
from dflow.tracing.argument_ids import is_list_of_strings, naming_ids, with_ids
from dflow.tracing.column_tables import refuse_table
from dflow.tracing.derivatives.discharge import State
from dflow.tracing.derivatives.discharge import evaluate as discharged
from dflow.tracing.derivatives.one_device import on_one_device
from dflow.tracing.errors import TrainingError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import accesses, host_resources, make_jaxpr
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.path_names import leaf_names
from dflow.tracing.primitives.id_checks import raises_failed_checks
from dflow.tracing.source import caller
from dflow.tracing.state.resources import Variable
from dflow.trainer.evaluation_totals import EXAMPLES, SharedTotals, Totals, add, results

#: By step (for a method: by its object, then its function), the programs by the types of their arguments.
_programs: MutableMapping[Any, dict[Any, dict[Any, _EvaluationProgram]]] = WeakKeyDictionary()


class NumberedBatches(Protocol):
    """Batches by number, such as a list, or `dflow.data.batches` of arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@suggests_keywords
@raises_failed_checks
def evaluate(
    step: Callable[..., Any],
    batches: Iterable[Any] | NumberedBatches,
    *,
    cluster: Cluster | None = None,
    name: str | None = None,
) -> dict[str, float]:
    """Return the metrics of `step(*batch)` over all examples of all batches, and `examples`, their number.

    step     a function that reads variables and writes none. It returns metrics by name, or one, which is then `loss`:
             each a float scalar, the mean over the batch's examples; an array with one value per example; or the state
             of a metric that is no mean, such as `dflow.metrics.auc(scores, labels)`, a pytree with `merge` and
             `compute`, whose values are called `name`, `name/key` or `name/index`. Beside means it may return
             `examples`, the number of examples that they are over, for instance of those not masked; by default the
             length of the first axis of the batch's arrays
    batches  tuples of arguments (any other value is passed as the only argument)
    cluster  the result of `dflow.connect()`: then all tasks of the cluster that evaluate under the same name share the
             batches, which they take by number, and all get the same result. Each batch is counted once, also if tasks
             die. By default this process evaluates all batches
    name     of a shared evaluation, the same on every task and new for each evaluation: a task that comes after its
             end, for instance because it was restarted, gets the same result

    The variables have the values of one moment between two steps, that of the first batch, on all tasks. Training waits
    for that moment and not for the evaluation: the values are then in the memory of each process that evaluates, which
    runs the step on its own devices.

    Raises TrainingError for a step that writes variables or uses queues, for other results, for batches whose number of
    examples is unclear, for no batches, and, if `cluster` is given, for batches without a number, variables elsewhere,
    a state whose `merge` does not add, or a name that this process has used before.
    """
    refuse_table("evaluate", batches, "give dflow.data.batches(data, size), which takes its rows", TrainingError)
    evaluation = _Evaluation(step)
    if (cluster is None) != (name is None):
        raise TrainingError(
            f"evaluate: expected cluster= and name= together, got {'name' if cluster is None else 'cluster'}= alone",
            'give both, for instance name=f"step {number}", or none of them',
            at=caller(),
        )
    by_number: Any = batches
    if cluster is None or name is None or not (count := _count_of(batches)):
        return results(evaluation.totals(_iterated(batches)))
    program = evaluation.program(by_number[0])
    shared, variables = cluster.part(Evaluations).begin(name, count), program.variables
    if shared is None or not variables:
        return results(evaluation.totals(_iterated(batches)))
    _check_shared(variables, cluster)
    as_floats = SharedTotals(program.types)

    def sums(numbers: range, values: Sequence[jax.Array]) -> dict[str, float]:
        evaluation.use(variables, values)
        return as_floats.floats(evaluation.totals(by_number[number] for number in numbers))

    return shared.run(variables, sums, lambda sums: results(as_floats.totals(sums)))


def is_on_tasks(step: Callable[..., Any], batches: NumberedBatches) -> bool:
    """Return whether all variables that the step reads are on tasks; traces it, for the first batch."""
    variables = _Evaluation(step).program(batches[0]).variables if _count_of(batches) else ()
    return bool(variables) and all(variable.home.shares_names for variable in variables)


def metric_names(step: Callable[..., Any], batches: Any) -> frozenset[str] | None:
    """Return the names of an evaluation's results; traces it, for the first batch. None if that can be taken once."""
    source = batches.loader if isinstance(batches, NumpyBatches) else batches
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        first = batches[0] if len(batches) else None
    elif hasattr(source, "__iter__") and iter(source) is not source:
        first = next(iter(batches), None)
    else:
        return None
    return None if first is None else _value_names(_Evaluation(step).program(first).types)


def _value_names(types: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the values of results of these types; None if a state has several values."""
    zeros = jax.tree_util.tree_map(lambda type: np.zeros(type.shape, type.dtype), dict(types))
    try:
        has_one = all(computed(name, on_host(zero)).keys() == {name} for name, zero in zeros.items() if is_state(zero))
    except Exception:  # of a library that computes nothing of zeros
        return None
    return frozenset({*types, EXAMPLES}) if has_one else None


@dataclass(frozen=True)
class _EvaluationProgram:
    """The step for one type of batch, as a function of variables' values.

    types     its results, with types in place of arrays
    examples  number of the batch's examples; None if the step returns it
    """

    variables: Sequence[Variable]
    types: Mapping[str, Any]
    examples: int | None
    run: Callable[[Sequence[jax.Array], Sequence[Any]], dict[str, Any]]

    def totals(self, outputs: Mapping[str, Any]) -> Totals:
        """Return the totals of a batch; waits until they are computed."""
        found = {name: on_host(v) if is_state(v) else np.asarray(v, np.float64) for name, v in outputs.items()}
        count = float(found.pop(EXAMPLES).sum()) if self.examples is None else float(self.examples)

        def total(value: Any) -> Any:
            if is_state(value):
                return value
            return float(value.sum() if value.ndim else value * count if count else 0)

        return {name: total(value) for name, value in found.items()} | {EXAMPLES: count}


class _Evaluation:
    """One evaluation by this process: the names of its metrics, and the values of the variables that it uses."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step, self._programs = step, _programs_of(step)
        self._names: frozenset[str] | None = None
        self._values: dict[Variable, jax.Array] | None = None

    def program(self, batch: Any) -> _EvaluationProgram:
        """Return the program for a batch."""
        return self._program_for(batch)[0]

    def use(self, variables: Sequence[Variable], values: Sequence[jax.Array]) -> None:
        """Use these values of the variables."""
        self._values = dict(zip(variables, on_one_device(values), strict=True))

    def totals(self, batches: Iterable[Any]) -> Totals:
        """Return the totals of these batches; captures the variables' values unless they are given."""
        totals: Totals = {}
        before: tuple[_EvaluationProgram, Mapping[str, Any]] | None = None
        with ExitStack() as captures:
            for batch in batches:
                program, leaves = self._program_for(batch)
                if self._values is None:
                    self.use(program.variables, _captured(program.variables, captures))
                outputs = program.run(self._values_for(program), leaves)
                # The device computes this batch while the process waits for the one before.
                _add(totals, before)
                before = program, outputs
            _add(totals, before)
        return totals

    def _program_for(self, batch: Any) -> tuple[_EvaluationProgram, list[Any]]:
        """Return the program for a batch, and the leaves of its arguments, with ids in place of strings."""
        given, ids = with_ids(batch, lambda: leaf_names("evaluate: batch", batch, is_list_of_strings))
        leaves, tree = jax.tree_util.tree_flatten(tuple(arguments_of(given)))
        with naming_ids(ids or ()):
            return self._program(leaves, tree), leaves

    def _program(self, leaves: Sequence[Any], tree: Any) -> _EvaluationProgram:
        """Return the program for arguments of these types, which is traced if it is new."""
        key = tree, tuple(map(array_type_of, leaves))
        if key not in self._programs:
            self._programs[key] = _traced(self._step, leaves, tree)
        return self._programs[key]

    def _values_for(self, program: _EvaluationProgram) -> list[jax.Array]:
        values = self._values or {}
        names = program.types.keys()
        self._names = self._names or frozenset(names)
        if names != self._names or not all(variable in values for variable in program.variables):
            before = f"{sorted(self._names)} of {[variable.name for variable in values]}"
            now = f"{sorted(names)} of {[variable.name for variable in program.variables]}"
            raise TrainingError(
                f"evaluate: expected the same metrics and variables for all batches, got {before} for the first and "
                f"{now} for another",
                "write the step so that it depends on the types of its arguments in neither",
                at=caller(),
            )
        return [values[variable] for variable in program.variables]


def _captured(variables: Sequence[Variable], captures: ExitStack) -> list[jax.Array]:
    """Return the values of one moment on each backend, which `captures` releases."""
    values: dict[Variable, jax.Array] = {}
    for backend, here in by_backend({variable.key: variable for variable in variables}).items():
        values.update(zip(here.values(), captures.enter_context(backend.at_one_moment([*here.values()])), strict=True))
    return [values[variable] for variable in variables]


def _add(totals: Totals, done: tuple[_EvaluationProgram, Mapping[str, Any]] | None) -> None:
    if done is not None:
        add(totals, done[0].totals(done[1]))


def _programs_of(step: Callable[..., Any]) -> dict[Any, _EvaluationProgram]:
    """Return the programs of a step, kept as long as the step; for an object that cannot be looked up, new ones."""
    owner, part = (step.__self__, step.__func__) if isinstance(step, MethodType) else (step, None)
    try:
        return _programs.setdefault(owner, {}).setdefault(part, {})
    except TypeError:
        return {}


def _traced(step: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> _EvaluationProgram:
    """Trace the step for these types of arguments. Raises TrainingError."""

    def flat(*leaves: Any) -> dict[str, Any]:
        result = step(*jax.tree_util.tree_unflatten(tree, leaves))
        return {str(name): value for name, value in named_results(result).items()}

    jaxpr, consts, types = make_jaxpr(flat, *leaves)
    reads, writes = accesses(jaxpr.effects)
    if touched := [*writes, *host_resources(jaxpr.effects)]:
        raise TrainingError(
            f"evaluate: expected a step that only reads variables, got one that changes {touched[0].name!r}",
            "give a function without updates, such as a model in evaluation mode, and return its metrics",
            at=caller(),
        )
    structure, variables = jax.tree_util.tree_structure(types), reads

    def run(values: Sequence[Any], consts: Sequence[Any], leaves: Sequence[Any]) -> Any:
        found = discharged(jaxpr, consts, leaves, State(zip(variables, values, strict=True)))
        return jax.tree_util.tree_unflatten(structure, found)

    jitted, examples = jax_jit(run), _checked_examples(leaves, types)
    return _EvaluationProgram(variables, types, examples, lambda values, leaves: jitted(values, consts, leaves))


def _checked_examples(leaves: Sequence[Any], types: Mapping[str, Any]) -> int | None:
    """Return the number of examples of a batch, None if the step returns it. Raises TrainingError for other results."""
    lengths = {np.shape(leaf)[0] for leaf in leaves if np.shape(leaf)}
    count = None if EXAMPLES in types else next(iter(lengths), None)
    if EXAMPLES not in types and len(lengths) != 1:
        raise TrainingError(
            f"evaluate: expected a batch whose arrays have one length, its number of examples, got {sorted(lengths)}",
            'have the step return {..., "examples": number} too',
            at=caller(),
        )
    for name, type in types.items():
        if not (_adds_up(type) if is_state(type) and name != EXAMPLES else _is_mean(name, type, count)):
            shown = jax.tree_util.tree_map(lambda leaf: str(array_type_of(leaf)), type)
            raise TrainingError(
                f"evaluate: {name}: expected a float scalar, the mean over the batch's examples, or without "
                f"{EXAMPLES!r} an array with one value for each of them, or the state of a metric, got {shown}",
                "return jnp.mean(...) of the values, the values themselves, or for instance dflow.metrics.auc(...)",
                at=caller(),
            )
    return count


def _is_mean(name: str, type: Any, count: int | None) -> bool:
    """Return whether a result is a mean over the batch's examples, or has one value for each of them."""
    if not _is_real(type):
        return False
    is_count = type.dtype.kind in "iub" and type.shape == () and name != EXAMPLES
    return not is_count and type.shape in ((), (count,))


def _adds_up(state: Any) -> bool:
    """Return whether a state has real arrays alone."""
    return all(map(_is_real, jax.tree_util.tree_leaves(state)))


def _is_real(type: Any) -> bool:
    dtype = getattr(type, "dtype", None)
    return isinstance(dtype, np.dtype) and np.can_cast(dtype, np.float64, "same_kind")


def _iterated(batches: Any) -> Iterable[Any]:
    if hasattr(batches, "__iter__"):
        return batches  # type: ignore[no-any-return]
    return (batches[number] for number in range(_count_of(batches)))


def _count_of(batches: Any) -> int:
    """Return the number of batches. Raises TrainingError unless they are taken by number."""
    try:
        if not hasattr(batches, "__getitem__"):
            raise TypeError(f"a {type(batches).__name__}")
        return len(batches)
    except TypeError as error:
        raise TrainingError(
            f"evaluate: expected batches with a length that are taken by number, got {error}",
            "give a list, or dflow.data.batches of arrays",
            at=caller(),
        ) from None


def _check_shared(variables: Sequence[Variable], cluster: Cluster) -> None:
    for variable in variables:
        if variable.home != cluster.home():
            raise TrainingError(
                f"evaluate: expected variables on tasks of the cluster, got {variable.name!r} of this process, which "
                f"other tasks do not see",
                "make it within cluster.parameter_servers(), or evaluate without cluster=",
                at=variable.loc,
            )
