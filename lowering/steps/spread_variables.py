"""Check that no variable spread over several devices is used in ops that are placed on one."""

from __future__ import annotations

from dflow.lowering.state.store import Store
from dflow.tracing.devices.device import WITH_STATE, choices_in
from dflow.tracing.devices.device_name import short_device_name, split_device_name
from dflow.tracing.errors import DeviceError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.source import at, caller


def refuse_spread(graph: Graph, traced: Traced, store: Store) -> None:
    """Raise DeviceError if a placed graph has a single device for a variable that is sharded over several devices."""
    for ref, variable in zip(graph.refs, traced.variables, strict=True):
        _, local = split_device_name(ref.device or "")
        if local and (sharding := store.sharding(variable.key)) is not None and len(sharding.device_set) > 1:
            raise DeviceError(
                f"variable {variable.name!r} is spread over {len(sharding.device_set)} devices, but is used in a "
                f"function that names devices for parts of it: {_named_device(traced)}",
                "leave dflow.device out of this function, or use the variable in a separate function, without "
                "scopes,\n  and pass on what it returns (docs/devices.md, 'One array over several devices')",
                at=caller(),
            )


def _named_device(traced: Traced) -> str:
    """Describe the first variable or op in the function that is placed on a named device."""
    for variable in traced.variables:
        if variable.device is not None:
            return f"variable {variable.name!r} is on {short_device_name(variable.device)}"
    scoped = [node for node in traced.graph.all_nodes() if node.device is not None]
    node = min(scoped, key=lambda node: node.device == WITH_STATE)
    name = "auto" if choices_in(node.device) is not None else short_device_name(node.device or "")
    return f"%{node.outputs[0].name} has the scope {name}{at(node.loc)}"
