"""Shardings over the `Explicit` axes of a mesh, which JAX keeps in the types of arrays.

Over `Auto` axes XLA decides how an array is spread, and over `Manual` axes, inside a `shard_map`, a value is one
shard. Neither is part of a type. A sharding here is a `NamedSharding` over an abstract mesh, with one entry for each
dimension, as `jax.typeof` gives it.

The text is JAX's, followed by the mesh: `[8@x,2@(y,z)]{x=2 y=2 z=4}`. A mesh axis that is not `Explicit` is followed by
its kind (`w=2:auto`); `unreduced:x` and `reduced:x` are the spec's sets of these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dflow.tracing.errors import ParseError

_AXIS = r"[\w.-]+"
_DIM = rf"(?:[0-9]{{1,19}}|\?)(?:@{_AXIS}|@\({_AXIS}(?:,{_AXIS})*\))?"
#: The sizes of an array, each with the axes of the mesh that it is spread over, and the mesh.
TEXT = rf"\[(?:{_DIM}(?:,{_DIM})*)?\](?:\{{[\w.:= -]*\}})?"
_SIZE = re.compile(rf"([0-9]+|\?)(?:@({_AXIS})|@\(({_AXIS}(?:,{_AXIS})*)\))?(?:,|$)")
_WORD = re.compile(rf"({_AXIS})(=|:)({_AXIS})(?::(\w+))?")
_MARKS = ("unreduced", "reduced")
_KINDS = {kind.name.lower(): kind for kind in AxisType}


def is_explicit(sharding: Any) -> TypeGuard[NamedSharding]:
    """Whether a sharding is over a mesh that has explicit axes."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def explicit_sharding(sharding: Any, shape: tuple[int, ...]) -> NamedSharding | None:
    """The sharding as JAX keeps it in the type of an array of this shape; None for a mesh without explicit axes."""
    if not is_explicit(sharding):
        return None
    abstract = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
    typed: NamedSharding = jax.core.ShapedArray(shape, jnp.float32, sharding=abstract).sharding
    return typed


def sharding_of_aval(aval: Any) -> NamedSharding | None:
    """The explicit sharding in JAX's abstract value of an array; None where there is none."""
    sharding = getattr(aval, "sharding", None)
    return sharding if is_explicit(sharding) else None


def meshes_of(shardings: Iterable[Any]) -> dict[AbstractMesh, Mesh]:
    """The meshes of devices of those `shardings` with explicit axes, by abstract mesh."""
    return {
        sharding.mesh.abstract_mesh: sharding.mesh
        for sharding in shardings
        if is_explicit(sharding) and isinstance(sharding.mesh, Mesh)
    }


def on_devices(struct: jax.ShapeDtypeStruct, meshes: Mapping[AbstractMesh, Mesh]) -> jax.ShapeDtypeStruct:
    """The type with its abstract mesh replaced by the mesh of devices in `meshes`, if that has one."""
    mesh = None if struct.sharding is None else meshes.get(struct.sharding.mesh)
    return struct if mesh is None else struct.update(sharding=NamedSharding(mesh, struct.sharding.spec))


def is_split(sharding: NamedSharding | None) -> bool:
    """Whether a sharding divides an array among devices; one that only replicates it does not."""
    return sharding is not None and bool(axes_split_over(sharding))


def axes_split_over(sharding: NamedSharding) -> set[Any]:
    """The axes of the mesh that a sharding divides an array along."""
    parts = [part if isinstance(part, tuple) else (part,) for part in sharding.spec.partitions if part is not None]
    return {axis for part in parts for axis in part} | set(sharding.spec.unreduced)


def manual_axes() -> set[Any]:
    """The axes of the mesh over which a `shard_map` is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Manual}


def sharding_here(sharding: NamedSharding | None, shape: tuple[int, ...]) -> NamedSharding | None:
    """The sharding in the current trace: inside a `shard_map` over the mesh, without the axes that are manual there."""
    if sharding is None or not manual_axes():
        return sharding
    return explicit_sharding(NamedSharding(jax.sharding.get_abstract_mesh(), sharding.spec), shape)


def with_sharding(value: Any, sharding: NamedSharding | None) -> Any:
    """The value, resharded to `sharding` in the current trace; unchanged for None and inside a `shard_map`."""
    if sharding is None or manual_axes() or sharding_of_aval(jax.typeof(value)) == sharding:
        return value
    return jax.sharding.reshard(value, sharding)


def sizes_text(shape: tuple[Any, ...], sharding: NamedSharding | None) -> str:
    """The text of a shape and how it is spread."""
    parts = [None] * len(shape) if sharding is None else sharding.spec.partitions
    sizes = [f"{'?' if size is None else size}{_axes_text(part)}" for size, part in zip(shape, parts, strict=True)]
    return f"[{','.join(sizes)}]{'' if sharding is None else _mesh_text(sharding)}"


def _axes_text(part: Any) -> str:
    if not part:
        return ""
    return f"@({','.join(map(str, part))})" if isinstance(part, tuple) else f"@{part}"


def _mesh_text(sharding: NamedSharding) -> str:
    mesh, spec = sharding.mesh, sharding.spec
    words = [
        f"{name}={size}" + ("" if kind is AxisType.Explicit else f":{kind.name.lower()}")
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    ]
    words += [f"{mark}:{axis}" for mark in _MARKS for axis in sorted(getattr(spec, mark))]
    return f"{{{' '.join(words)}}}"


def parse_sizes(text: str) -> tuple[tuple[int | None, ...], NamedSharding | None]:
    """Read back a text that `sizes_text` gave. Raises ParseError for any other text."""
    if re.fullmatch(TEXT, text) is None:
        raise ParseError(f"{text!r} is not a shape; a shape looks like [2,3] or [8@x,2]{{x=4}}")
    sizes, _, mesh = text[1:].partition("]")
    found = [match.groups() for match in _SIZE.finditer(sizes)] if sizes else []
    shape = tuple(None if size == "?" else int(size) for size, *_ in found)
    if not mesh:
        if any(one or several for _, one, several in found):
            raise ParseError(f"{text!r} is spread over the axes of a mesh and does not say which, as in [8@x]{{x=4}}")
        return shape, None
    spec = [tuple(several.split(",")) if several else one for _, one, several in found]
    return shape, _parse_sharding(mesh[1:-1], spec, shape, text)


def _parse_sharding(mesh: str, spec: list[Any], shape: tuple[Any, ...], text: str) -> NamedSharding:
    try:
        words = [_WORD.fullmatch(word).groups() for word in mesh.split()]  # type: ignore[union-attr]
        axes = [(name, int(size), _KINDS[kind or "explicit"]) for name, mark, size, kind in words if mark == "="]
        marked = {mark: {axis for kind, colon, axis, _ in words if (kind, colon) == (mark, ":")} for mark in _MARKS}
        names, sizes, kinds = zip(*axes, strict=True)
        sharding = NamedSharding(AbstractMesh(sizes, names, axis_types=kinds), PartitionSpec(*spec, **marked))
        typed = explicit_sharding(sharding, shape)
    except (AttributeError, KeyError, TypeError, ValueError):
        typed = None
    if typed is None:
        raise ParseError(
            f"{text!r} has a mesh that does not fit; a type on a mesh looks like f32[8@x,2]{{x=4 y=2:auto}}"
        )
    return typed
