"""The bytes of one hostile connection, drawn from a seed.

A script consists of frames: valid ones with senseless fields, and frames with bytes changed, removed, doubled or
swapped. Most scripts begin with a valid `Hello`, since nothing after an invalid one is read.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from dflow.distributed.transport.framing import HEADER, MAGIC, pack_header
from dflow.distributed.transport.link import Frame, Kind
from dflow.distributed.wire.codec import ANY_MESSAGE, encode_message
from dflow.distributed.wire.messages.basic import Hello, Introduce
from dflow.lowering.programs.program import export_program
from dflow.lowering.steps.plan import Plan
from dflow.tracing.ir.types import ArrayType
from tests.fuzz.values import ENCODER, INTEGERS, damaged, struct_of, types_of

TASK = "/job:ps/task:0"
#: The members of the victim's cluster.
WORKERS = tuple(f"/job:worker/task:{index}" for index in range(3))
MESSAGES = types_of(ANY_MESSAGE)
PLAN = msgspec.inspect.type_info(Plan)
#: Largest payload: a task that keeps payloads for a while then uses little memory.
MAX_PAYLOAD = 4096


@dataclass(frozen=True)
class Script:
    """Bytes to send over one connection, and the number of their frames."""

    data: bytes
    frames: int


def script(rng: random.Random) -> Script:
    """Return one connection's bytes."""
    frames = [hello(rng)] if rng.random() < 0.95 else []
    count = rng.choice((1, 2, 5, 20, 60))
    frames += [numbered(rng.choices(KINDS, WEIGHTS)[0](rng), number) for number in range(2, count + 2)]
    if rng.random() < 0.1:
        rng.shuffle(frames)
    data = b"".join(frames)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)]
    return Script(data, len(frames))


def hello(rng: random.Random) -> bytes:
    """A right `Hello`, of a member of the cluster, which a task believes once it has introduced itself."""
    name = packed(encode_message(Hello(rng.choice(WORKERS), session=rng.randbytes(8).hex())), b"", Kind.NOTIFY, 0)
    return name + numbered(packed(encode_message(Introduce(0)), b"", Kind.REQUEST, 1 << 40), 1)


def numbered(frame: bytes, number: int) -> bytes:
    """The frame with its number in the session, unless its header was changed there."""
    start, end = HEADER.size - 16, HEADER.size - 8
    if not frame.startswith(MAGIC) or any(frame[start:end]):
        return frame
    return frame[:start] + number.to_bytes(8, "little") + frame[end:]


def packed(meta: bytes, payload: bytes, kind: Kind, number: int) -> bytes:
    return pack_header(Frame(kind, number, meta, payload)) + meta + payload


def wrapped(meta: bytes, payload: bytes, rng: random.Random) -> bytes:
    kind = rng.choices((Kind.REQUEST, Kind.NOTIFY, Kind.REPLY), (6, 3, 1))[0]
    return packed(meta, payload, kind, rng.choice((0, 1, 2, 3, (1 << 64) - 1)))


def senseless(rng: random.Random) -> bytes:
    """A message with fields of the right types and random values."""
    fields = struct_of(rng.choice(MESSAGES), rng)
    if fields.get("type") == "RegisterPlan":
        return plan(rng)
    return wrapped(ENCODER.encode(fields), rng.randbytes(rng.choice((0, 0, 4, 8, 100, MAX_PAYLOAD))), rng)


def wrong(rng: random.Random) -> bytes:
    """A message with one part of another type."""
    fields = damaged(struct_of(rng.choice(MESSAGES), rng), rng)
    return wrapped(ENCODER.encode(fields), b"", rng)


def changed(rng: random.Random) -> bytes:
    """A frame with bytes flipped, inserted, removed or doubled."""
    data = bytearray(senseless(rng))
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[place : place + rng.randrange(1, 9)]
                data = data or bytearray(1)
            case _:
                data[place:place] = data[place : place + 40]
    return bytes(data)


def other_header(rng: random.Random) -> bytes:
    """A frame with a number in its header replaced by a likely bad one."""
    data = bytearray(senseless(rng))
    size = rng.choice((1, 4, 8))
    place = rng.randrange(HEADER.size // size) * size
    number = rng.choice(INTEGERS) % (1 << 8 * size)
    data[place : place + size] = number.to_bytes(size, "little")
    return bytes(data)


def lying(rng: random.Random) -> bytes:
    """msgpack whose declared length or depth exceeds its content or any limit."""
    heads = [kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")]
    deep = rng.choice((b"\x91", b"\x81\xa4type", b"\xdc\x00\x01")) * rng.choice((10, 1000, 20_000))
    return wrapped(rng.choice((*heads, deep, b"\x81\xa4type\xa8Register", b"\xc1")), b"", rng)


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 31, 32, 33, 200)))


def plan(rng: random.Random) -> bytes:
    """A plan to keep and run: random, or a valid one with a part changed; with or without a program."""
    assert isinstance(PLAN, msgspec.inspect.StructType)
    fields = struct_of(PLAN, rng) if rng.random() < 0.5 else _good_plan()
    fields["task"] = TASK if rng.random() < 0.9 else fields["task"]
    if rng.random() < 0.7:
        fields = damaged(fields, rng)
    encoded = ENCODER.encode(fields)
    if rng.random() < 0.2:
        encoded = bytes(_flipped(encoded, rng))
    message = {"type": "RegisterPlan", "plan": encoded, "program_sizes": [len(_program())]}
    return packed(ENCODER.encode(message), _program(), Kind.REQUEST, 9)


def program(rng: random.Random) -> bytes:
    """An exported program with bytes changed, to be kept, or to be run as a variable's initialiser."""
    data = bytes(_flipped(_program(), rng)) if rng.random() < 0.9 else _program()[: rng.randrange(len(_program()))]
    if rng.random() < 0.5:
        message: dict[str, Any] = {
            "type": "RegisterPlan",
            "plan": ENCODER.encode(_good_plan()),
            "program_sizes": [len(data)],
        }
    else:
        message = {
            "type": "CreateVariables",
            "variables": [_good_variable()],
            "arrays": [{"dtype": "float32", "shape": [3]}],
            "program_sizes": [len(data)],
        }
        data = bytes(12) + data
    return packed(ENCODER.encode(message), data, Kind.REQUEST, 9)


def _flipped(data: bytes, rng: random.Random) -> bytearray:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 5))):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return changed


def _good_variable() -> dict[str, Any]:
    call = {"program": 0, "takes": [0]}
    return {"name": "fuzz", "dtype": "float32", "shape": [3], "arrays": 1, "calls": [call], "result": 1}


def _good_plan() -> dict[str, Any]:
    call = {"type": "call", "program": 0, "writes": ["v"], "reads": [], "takes": [], "gives": [0]}
    send = {"type": "send", "edge": "e", "destination": TASK, "takes": [0], "after": [0]}
    receive = {"type": "recv", "edge": "r", "source": TASK, "gives": [1], "types": [["f32", [3]]]}
    return {"task": TASK, "registers": 2, "items": [call, send, receive], "feeds": [], "fetches": []}


@functools.cache
def _program() -> bytes:
    three = ArrayType(np.dtype("float32"), (3,))
    return export_program(lambda v: [v * 2, jnp.sum(v)], [three])


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(senseless, wrong, changed, other_header, lying, noise, plan, program),
)
WEIGHTS = (40, 20, 12, 12, 6, 5, 4, 3)
