"""Writing a program for another process, and reading one that another sent: what such a program may do.

Why: JAX takes the bytes of an export as trusted. A custom call in them may name anything that is registered in this
process and hand it a pointer of its own, as callbacks into Python do; and their trees may name types of the user's,
whose code then reads more bytes. So both are looked at before JAX acts on them.

A module may be malformed too: of a few hundred programs in bytecode with bytes changed one ended the process that read
it, where of many thousand texts none did. So between tasks a module travels as text, and the bytecode of a file is made
text in a separate process (`bytecode_reader`).

Invariants: what is read holds ops of no dialect but those of exports, calls only the library routines that JAX itself
lets an export call and what the reader allows, neither waits for nor feeds the host, and has arguments and results in
plain tuples, lists and dicts. So do its derivatives. XLA is no jail: a program from elsewhere may use this machine's
processors, memory and, should XLA have a fault, more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from jax import export

from dflow.tracing.errors import WireError
from dflow.tracing.jax_frontend import STABLE_CALL_TARGETS, export_trees, with_derivative, with_module, with_text

#: Nodes in the trees of arguments and results.
MAX_TREE_NODES = 1 << 17
MAX_TREE_DEPTH = 64
#: Of the dialects that exports are made of.
DIALECTS = frozenset({"builtin", "chlo", "func", "sdy", "stablehlo"})
#: Ops that speak with the host or with other programs, for which nobody here would answer.
REFUSED_OPS = frozenset(f"stablehlo.{name}" for name in ("infeed", "outfeed", "send", "recv"))


def write_program(exported: export.Exported) -> bytes:
    """The bytes that `read_program` takes."""
    return bytes(with_text(exported).serialize())


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
    """The exported program that the bytes hold, with its derivatives.

    allowed  targets that it may call beside the library routines
    as_text  makes the text of a module from its bytes

    Raises WireError if the bytes hold none, or one that may not be run here.
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
