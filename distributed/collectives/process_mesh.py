"""The mesh of devices of all processes of a group: the shardings of variables on it, and batches divided over it.

Each process gives its own part of a batch. Processes whose devices have the same positions along the axis of batches,
such as processes that divide one model's layers, give the same part.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from dflow.distributed.collectives.agreed_programs import AgreedPrograms
from dflow.distributed.collectives.compared_variables import compare_variables
from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.steps.steps_ahead import refusing_steps
from dflow.distributed.training.applying import shared_step
from dflow.lowering.state.store import Store
from dflow.tracing.errors import DeviceError, StrategyError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.number_range import check_numbers
from dflow.tracing.path_names import leaf_names
from dflow.tracing.state.context import spreading
from dflow.tracing.state.resources import Variable, is_variable
from dflow.tracing.weak_by_identity import WeakDict


class ProcessMesh:
    """A mesh of all devices of all processes.

    axes           sizes of the mesh by the names of its axes; one of them may be -1: what the others leave
    batch_axis     the axis over which batches are divided
    fully_sharded  whether variables without a spec are divided over the axis of batches
    raises         StrategyError for axes that do not fit the number of devices, for another `batch_axis`, or if the
                   processes have unequal parts of the axis of batches
    """

    def __init__(self, axes: Mapping[str, int], batch_axis: str, *, fully_sharded: bool) -> None:
        if batch_axis not in axes:
            raise StrategyError(f"AllReduce: batch_axis: expected one of {[*axes]}, got {batch_axis!r}")
        sizes = _sizes(axes, jax.device_count())
        self.mesh = jax.make_mesh(sizes, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))
        self._batch_axis, self._fully_sharded = batch_axis, fully_sharded
        positions = self._positions()
        parts = sorted({*positions.values()})
        if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != self.mesh.shape[batch_axis]:
            counts = ", ".join(f"process {process}: {list(part)}" for process, part in sorted(positions.items()))
            raise StrategyError(
                f"AllReduce: axes: expected equal parts of the axis {batch_axis!r} on all processes, got {counts}",
                "give each process the same number of devices, and the axis of batches first",
            )
        #: Index of this process's part of each batch, and the number of parts.
        self.part, self.parts = parts.index(positions[jax.process_index()]), len(parts)
        #: Number of pieces into which this process's part is divided.
        self.pieces = len(parts[0])
        #: Whether other processes give the same part.
        self.shares_part = jax.process_count() > len(parts)

    def _positions(self) -> dict[int, tuple[int, ...]]:
        """Return, by process, the positions along the axis of batches at which it has devices."""
        axis = self.mesh.axis_names.index(self._batch_axis)
        found: dict[int, set[int]] = {}
        for index, device in np.ndenumerate(self.mesh.devices):
            found.setdefault(device.process_index, set()).add(index[axis])
        return {process: tuple(sorted(positions)) for process, positions in found.items()}

    @contextmanager
    def shared_step(self, programs: AgreedPrograms, point: str, *, is_one_call: bool) -> Iterator[None]:
        """Return the context of a step, which raises VariableError for an optimizer with variables not on this mesh.

        programs     compares the programs of the step with those of the other processes
        point        name of the step, which all processes have come to
        is_one_call  whether it is one call of a function of `dflow.jit`

        A step with variables or queues on other tasks is refused with StrategyError: each process would run all of it,
        and apply each update again.
        """
        why = "AllReduce: expected a step over variables of the mesh, got one with variables or queues on other tasks"
        remedy = "train by Hybrid, which has tables on tasks, or by Sync"
        ours = shared_step(lambda one: not self._has(one), "strategy.variables()")
        with ours, refusing_steps(why, remedy), programs.step(point, is_one_call=is_one_call):
            yield

    def _has(self, variable: Any) -> bool:
        if self.mesh.size == 1:  # the only process, where variables have no sharding
            return not variable.home.shares_names
        sharding = variable.sharding
        return isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh

    def variables(self, group: ProcessGroup | None, store: Store) -> AbstractContextManager[None]:
        """Return a context that spreads its new variables over this mesh.

        At its end, compares them with those of the other processes; raises StrategyError in all if they differ.
        """
        return _compared(group, store, self.sharding_of)

    def copies(
        self, group: ProcessGroup | None, store: Store, known: WeakDict[Variable, None]
    ) -> AbstractContextManager[None]:
        """Return a context that adds its new variables, of which each process makes a copy, to `known`.

        At its end, compares the copies; raises StrategyError in all processes if they differ. Raises DeviceError for a
        variable with a `PartitionSpec`.
        """

        def keep(variable: Variable) -> Sharding | None:
            if isinstance(variable.sharding, PartitionSpec):
                raise DeviceError(
                    f"variable {variable.name!r}: sharding: expected None, for a copy in each process, got "
                    f"{variable.sharding}",
                    "leave it out, or train by AllReduce",
                    at=variable.loc,
                )
            known[variable] = None
            return variable.sharding

        return _compared(group, store, keep)

    def sharding_of(self, variable: Variable) -> Sharding | None:
        """Return the sharding of a new variable: its own `Sharding`, or one over this mesh by its `PartitionSpec`.

        None without a `Sharding` on a mesh of one device. Raises DeviceError for a spec that does not fit.
        """
        given = variable.sharding
        if isinstance(given, Sharding):
            return given
        if self.mesh.size == 1:
            return None
        spec = [*(given or ()), *[None] * (variable.ndim - len(given or ()))]
        used = {axis for part in spec for axis in (part if isinstance(part, tuple) else (part,))}
        if self._fully_sharded and self._batch_axis not in used:
            size = self.mesh.shape[self._batch_axis]
            free = [axis for axis, part in enumerate(spec) if part is None and variable.shape[axis] % size == 0]
            if free:
                spec[max(free, key=lambda axis: variable.shape[axis])] = self._batch_axis
        try:
            sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
            sharding.shard_shape(variable.shape)
        except ValueError as error:
            raise DeviceError(
                f"variable {variable.name!r}: sharding: expected a PartitionSpec for {variable.type} over the axes "
                f"{dict(self.mesh.shape)}, got {given}: {str(error).splitlines()[0]}",
                "name axes of the mesh, whose sizes divide the dimensions",
                at=variable.loc,
            ) from None
        return sharding

    def described(self, batch: Any) -> str:
        """Return a text that is equal for batches of the same structure, shapes, dtypes and scalars.

        Raises StrategyError for an array that cannot be divided among the devices of this process, and
        NumberRangeError for integers beyond 32 bits: see `check_numbers`.
        """
        leaves, tree = jax.tree_util.tree_flatten(batch, is_leaf=is_variable)
        check_numbers(leaves, lambda: leaf_names("run: batches: batch", batch, is_variable))
        return f"{', '.join(map(self._described, leaves))} in {tree}"

    def _described(self, leaf: Any) -> str:
        if not _is_divided(leaf):
            return repr(leaf) if not hasattr(leaf, "dtype") or is_variable(leaf) else f"{leaf.dtype} {_scalar(leaf)}"
        type = array_type_of(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise StrategyError(
                f"run: batches: expected arrays of numbers, got {type}",
                "give one key for the whole batch, the same in all processes, and split it in the step",
            )
        if leaf.shape[0] % self.pieces:
            raise StrategyError(
                f"run: batches: expected a first dimension that is a multiple of {self.pieces}, the number of devices "
                f"of this process along {self._batch_axis!r}, got {type}",
                "give batches of such a size; dflow.data.batches has drop_remainder=True for the last one",
            )
        return str(type)

    def checksum(self, batch: Any) -> int:
        """Return a checksum of the arrays that are divided, to compare batches of processes that give the same part."""
        found = 0
        for leaf in jax.tree_util.tree_leaves(batch, is_leaf=is_variable):
            if _is_divided(leaf):
                found = zlib.crc32(np.asarray(leaf).tobytes(), found)
        return found

    def divided(self, batch: Any) -> Any:
        """Return the batch of all processes; `batch` is this process's part.

        Its arrays are divided along their first dimension; scalars and other leaves stay as they are.
        """
        if self.mesh.size == 1:
            return batch
        sharding = NamedSharding(self.mesh, PartitionSpec(self._batch_axis))

        def divided(leaf: Any) -> Any:
            if not _is_divided(leaf):
                return leaf
            shape = (leaf.shape[0] * self.parts, *leaf.shape[1:])
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

        return jax.tree_util.tree_map(divided, batch, is_leaf=is_variable)


@contextmanager
def _compared(
    group: ProcessGroup | None, store: Store, sharding_of: Callable[[Variable], Sharding | None]
) -> Iterator[None]:
    """Return a context that gives each new variable the sharding that `sharding_of` returns.

    At its end, compares the variables with those of the other processes; raises StrategyError in all if they differ.
    """
    made: list[Variable] = []

    def spread(variable: Variable) -> Sharding | None:
        made.append(variable)
        return sharding_of(variable)

    with spreading(spread):
        yield
    if group is not None:
        compare_variables(group, store, made)


def _sizes(axes: Mapping[str, int], devices: int) -> tuple[int, ...]:
    """Return the sizes of the axes, with -1 filled in. Raises StrategyError unless their product is `devices`."""
    known = math.prod(size for size in axes.values() if size != -1)
    is_open = [*axes.values()].count(-1)
    is_valid = all(size == -1 or size > 0 for size in axes.values()) and is_open <= 1 and known > 0
    if not is_valid or devices % known or (not is_open and known != devices):
        raise StrategyError(
            f"AllReduce: axes: expected sizes whose product is {devices}, the number of devices of all processes, got "
            f"{dict(axes)}",
            "give one of them the size -1, which means all remaining devices",
        )
    return tuple(devices // known if size == -1 else size for size in axes.values())


def _is_divided(leaf: Any) -> bool:
    """Whether a leaf of a batch is divided: an array of at least one dimension, with all its values in this process."""
    is_array = hasattr(leaf, "dtype") and not is_variable(leaf) and getattr(leaf, "ndim", 0) > 0
    return is_array and not (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)


def _scalar(leaf: Any) -> str:
    """Return the value of a scalar as text, or the type of an array over all processes."""
    if getattr(leaf, "ndim", 0):
        return f"over all processes: {array_type_of(leaf)}"
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return str(jax.random.key_data(leaf) if is_key else leaf)
