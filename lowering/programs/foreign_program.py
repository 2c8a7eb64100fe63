"""Serialize programs for other processes, and read and check programs that other processes sent.

Why: JAX trusts the bytes of an export. A custom call in them may name any target that is registered in this process and
pass it an arbitrary pointer, as Python callbacks do. Their pytrees may name classes of the user's program, whose code
then reads more of the bytes. So both are checked before JAX uses them.

A module may also be malformed. In tests, one of a few hundred programs in bytecode with changed bytes crashed the
process that read it, but none of many thousand texts. So tasks send modules as text, and the bytecode of a file is
converted to text in a separate process (`bytecode_reader`).

Invariants: a program that was read has only ops of the dialects of exports. It calls only the library routines that JAX
allows in exports and the targets in `allowed`. It exchanges no data with the host while it runs, and its arguments and
results are plain tuples, lists and dicts. The same holds for its derivatives. XLA is not a sandbox: a program from
elsewhere may use this machine's processors and memory and, if XLA has a fault, more.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jax import export

from dflow.tracing.errors import WireError
from dflow.tracing.jax_frontend import STABLE_CALL_TARGETS, export_trees, with_derivative, with_module

#: Limits on the pytrees of arguments and results.
MAX_TREE_NODES = 1 << 17
MAX_TREE_DEPTH = 64
#: The dialects of exports.
DIALECTS = frozenset({"builtin", "chlo", "func", "sdy", "stablehlo"})
#: Ops that exchange data with the host or with other programs; here they would never be answered.
REFUSED_OPS = frozenset(f"stablehlo.{name}" for name in ("infeed", "outfeed", "send", "recv"))

_SCRIPT = Path(__file__).with_name("read_bytecode.py")


def write_program(exported: export.Exported) -> bytes:
    """Return the bytes of a program, for `read_program`."""
    text = exported.mlir_module().encode()
    return bytes(dataclasses.replace(exported, mlir_module_serialized=text).serialize())


class RefusedCall(WireError):
    """A program calls a target that the reader does not allow."""

    def __init__(self, program: str, target: str) -> None:
        self.target = target
        super().__init__(
            f"program {program!r} calls {target!r}, which a program from another process may not: only "
            "the library routines that JAX guarantees for exports are, and no callbacks into Python"
        )


def read_program(
    blob: bytes | bytearray | memoryview,
    *,
    allowed: Collection[str] = (),
    as_text: Callable[[bytes], str] = bytes.decode,
) -> export.Exported:
    """Return the exported program in the bytes, with its derivatives.

    allowed  targets that it may call besides the library routines
    as_text  converts the bytes of a module to text

    Raises WireError if the bytes are no program, or one that may not run here.
    """
    data = bytearray(blob)
    try:
        _check_trees(data)
        return _checked(export.deserialize(data), {*STABLE_CALL_TARGETS, *allowed}, as_text)
    except WireError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0][:200]
        raise WireError(
            f"{len(data)} bytes are no exported program: {type(error).__name__}: {first}; install the same JAX on both"
        ) from error


def _checked(read: export.Exported, allowed: Collection[str], as_text: Callable[[bytes], str]) -> export.Exported:
    program, ops = with_module(read, as_text(read.mlir_module_serialized))
    _check_ops(read.fun_name, ops, allowed)
    checked: export.Exported = with_derivative(
        program, _checked(read.vjp(), allowed, as_text) if read.has_vjp() else None
    )
    return checked


def _check_trees(data: bytearray) -> None:
    for number, (is_plain, depth) in enumerate(export_trees(data)):
        if not is_plain:
            raise WireError("a program has a tree of a type of the user's; send plain tuples, lists and dicts")
        if number >= MAX_TREE_NODES or depth > MAX_TREE_DEPTH:
            raise WireError(
                f"a program takes or gives trees of more than {MAX_TREE_NODES} nodes or {MAX_TREE_DEPTH} levels"
            )


def _check_ops(program: str, ops: Iterable[tuple[str, str]], allowed: Collection[str]) -> None:
    for name, target in ops:
        if target and target not in allowed:
            raise RefusedCall(program, target)
        if name in REFUSED_OPS or name.partition(".")[0] not in DIALECTS:
            raise WireError(f"program {program!r} does {name!r}, which a program from another process may not")


@contextmanager
def bytecode_reader() -> Iterator[Callable[[bytes], str]]:
    """Yield a function that converts the bytecode of a module to text, in a separate process.

    It raises ValueError for bytecode that cannot be read. Entering the block raises OSError if no process can start.
    """
    # The process must import the same JAX, and no modules from the script's folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-P", "-S", str(_SCRIPT)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield lambda module: _text(process, module)
        finally:
            process.kill()


def _text(process: subprocess.Popen[bytes], module: bytes) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(module).to_bytes(8, "little") + module)
        process.stdin.flush()
    except BrokenPipeError:
        head = b""
    else:
        head = process.stdout.read(9)
    if len(head) < 9:
        raise ValueError(f"its bytecode is damaged: it ended the process that read it with status {process.wait()}")
    said = process.stdout.read(int.from_bytes(head[1:], "little")).decode()
    if not head[0]:
        raise ValueError(said)
    return said
