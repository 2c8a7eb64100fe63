"""Variables spread over several devices of the task that holds them.

A worker does not know the devices of another task, so it gives a mesh without devices. The task puts its own first
devices there, in their order.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflow.distributed.wire.messages.variables import VariableLayout
from dflow.tracing.errors import DeviceError
from dflow.tracing.state.resources import Variable


def layout_of(variable: Variable) -> VariableLayout | None:
    """Return the layout that the sharding of a variable asks for; None without one.

    raises  DeviceError for a sharding that is not over an AbstractMesh with automatic axes
    """
    sharding = variable.sharding
    if sharding is None:
        return None
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", ())
    if not isinstance(mesh, AbstractMesh) or {*mesh.axis_types} != {AxisType.Auto}:
        raise DeviceError(
            f"variable {variable.name!r} is created among the parameter servers with {sharding}, which is not over the "
            f"devices of another task",
            "give jax.sharding.NamedSharding(mesh, spec) with a mesh of "
            "the task's devices: jax.sharding.AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))",
            at=variable.loc,
        )
    parts = ((part,) if isinstance(part, str) else part or () for part in spec)
    return VariableLayout(tuple(mesh.shape.items()), tuple(map(tuple, parts)))


def on_devices(layout: VariableLayout, name: str) -> NamedSharding:
    """Return the sharding of variable `name` over this task's first devices. Raises DeviceError if it has fewer."""
    names, sizes = [axis for axis, _ in layout.mesh], [size for _, size in layout.mesh]
    devices, count = jax.local_devices(), math.prod(sizes)
    if not 0 < count <= len(devices):
        raise DeviceError(
            f"variable {name!r} is spread over {count} devices, and its task has {len(devices)}",
            "give a mesh of at most as many, or start the task with more",
        )
    mesh = Mesh(np.array(devices[:count]).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*(part or None for part in layout.spec)))
