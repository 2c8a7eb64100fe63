"""Values for the fields of messages: of the right types with mostly senseless values, or of other types.

The fields come from the message's struct, so a new message is covered without a change here.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect as shapes

#: Names for all fields: few, so that a task stores little by name, and some that are invalid.
NAMES = (
    *("w", "v", "q", "fuzz", "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "", "float32", "int4"),
    *("queue<f32[2]>", "accumulator<f32[]>", "queue.enqueue", "queue.dequeue", "accumulator.take", "mean", "fifo", "1"),
    *(
        "../../etc/passwd",
        "a" * 5000,
        "\0",
        "\n\x1b[31m",
        "\ufdfd",
        "-1",
        "nan",
        "cpu:0",
        "object",
        "/job:x/task:999999",
    ),
)
INTEGERS = (
    *(0, 1, 2, 3, -1, 7, 64, 255, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31)),
    *((1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
)
#: Few values, since a task remembers some ended steps of each origin.
STEPS = (0, 1, 2, 3, 1 << 62)
FLOATS = (0.0, 0.001, 0.01, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
MAX_DEPTH = 4


def value_of(kind: shapes.Type, rng: random.Random, depth: int = 0) -> Any:
    """A value of type `kind`, as msgspec's builtins."""
    match kind:
        case shapes.IntType():
            return rng.choice(INTEGERS) if rng.random() < 0.5 else rng.randrange(5)
        case shapes.FloatType():
            return rng.choice(FLOATS)
        case shapes.StrType():
            return rng.choice(NAMES)
        case shapes.BytesType():
            return rng.randbytes(rng.choice((0, 1, 40)))
        case shapes.BoolType():
            return rng.random() < 0.5
        case shapes.NoneType():
            return None
        case shapes.UnionType(types=types):
            return value_of(rng.choice(types), rng, depth)
        case shapes.VarTupleType(item_type=item) | shapes.ListType(item_type=item):
            count = 0 if depth >= MAX_DEPTH else rng.choice((0, 1, 1, 2, 3, 70))
            return [value_of(item, rng, depth + 1) for _ in range(count)]
        case shapes.TupleType(item_types=items):
            return [value_of(item, rng, depth + 1) for item in items]
        case shapes.DictType(key_type=key, value_type=value):
            return {str(value_of(key, rng)): value_of(value, rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))}
        case shapes.NamedTupleType(fields=fields):
            return [value_of(field.type, rng, depth + 1) for field in fields]
        case shapes.EnumType(cls=members):
            return rng.choice([*members]).value
        case shapes.LiteralType(values=values):
            return rng.choice(values)
        case shapes.StructType():
            return struct_of(kind, rng, depth)
    raise NotImplementedError(f"no values for {kind}")


def struct_of(kind: shapes.StructType, rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A struct with its tag; sometimes a field is missing or added."""
    fields = {field.encode_name: value_of(field.type, rng, depth + 1) for field in kind.fields}
    if "step" in fields:
        fields["step"] = rng.choice(STEPS)
    if "timeout_s" in fields:
        fields["timeout_s"] = rng.choice((0.0, 0.01, -1.0, float("nan")))
    if kind.tag_field is not None:
        fields[kind.tag_field] = kind.tag
    return fields


def damaged(value: Any, rng: random.Random) -> Any:
    """The value with one part of another type, removed, or deeply nested."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], damaged(value[place], rng), *value[place + 1 :]]
    deep: Any = 0
    for _ in range(rng.choice((1, 30, 600))):
        deep = [deep]
    return rng.choice((None, True, 1.5, "x", b"x", -1, 1 << 63, [], {}, {"type": "Hello"}, deep))


def types_of(union: Any) -> tuple[shapes.StructType, ...]:
    """Return the structs of a union of messages."""
    found = shapes.type_info(union)
    assert isinstance(found, shapes.UnionType)
    return tuple(kind for kind in found.types if isinstance(kind, shapes.StructType))


ENCODER = msgspec.msgpack.Encoder()
