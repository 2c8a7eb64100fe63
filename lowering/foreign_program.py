"""Writing a program for another process, and reading one that another sent: what such a program may do.

Why: JAX takes the bytes of an export as trusted. A custom call in them may name anything that is registered in this
process and hand it a pointer of its own, as callbacks into Python do; and their trees may name types of the user's,
whose code then reads more bytes. So both are looked at before JAX acts on them.

The module travels as text and not as bytecode: the reader of bytecode trusts it, and of a few hundred programs with
bytes changed one ended the process, where of many thousand texts none did.

Invariants: what is read holds ops of no dialect but those of exports, calls only the library routines that JAX itself
lets an export call, neither waits for nor feeds the host, and has arguments and results in plain tuples, lists and
dicts. XLA is no jail: who may send programs here may use this machine's processors, memory and, should XLA have a
fault, more.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax import export

from dflow.tracing.errors import WireError
from dflow.tracing.jax_frontend import STABLE_CALL_TARGETS, export_trees, with_bytecode, with_text

#: Nodes in the trees of arguments and results.
MAX_TREE_NODES = 1 << 17
MAX_TREE_DEPTH = 16
#: Of the dialects that exports are made of.
DIALECTS = frozenset({"builtin", "chlo", "func", "sdy", "stablehlo"})
#: Ops that speak with the host or with other programs, for which nobody here would answer.
REFUSED_OPS = frozenset(f"stablehlo.{name}" for name in ("infeed", "outfeed", "send", "recv"))


def write_program(exported: export.Exported) -> bytes:
    """The bytes that `read_program` takes."""
    return bytes(with_text(exported).serialize())


def read_program(blob: bytes | bytearray | memoryview) -> export.Exported:
    """The exported program that the bytes hold; raises WireError if they hold none, or one that may not be run here."""
    data = bytearray(blob)
    try:
        _check_trees(data)
        exported, ops = with_bytecode(export.deserialize(data))
        _check_ops(exported.fun_name, ops)
    except WireError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0][:200]
        raise WireError(
            f"{len(data)} bytes are no exported program: {type(error).__name__}: {first}; install the same JAX on both"
        ) from error
    found: export.Exported = exported
    return found


def _check_trees(data: bytearray) -> None:
    for number, (is_plain, depth) in enumerate(export_trees(data)):
        if not is_plain:
            raise WireError("a program has a tree of a type of the user's; send plain tuples, lists and dicts")
        if number >= MAX_TREE_NODES or depth > MAX_TREE_DEPTH:
            raise WireError(
                f"a program takes or gives trees of more than {MAX_TREE_NODES} nodes or {MAX_TREE_DEPTH} levels"
            )


def _check_ops(program: str, ops: Iterable[tuple[str, str]]) -> None:
    for name, target in ops:
        if target and target not in STABLE_CALL_TARGETS:
            raise WireError(
                f"program {program!r} calls {target!r}, which a program from another process may not: only "
                "the library routines that JAX guarantees for exports are, and no callbacks into Python"
            )
        if name in REFUSED_OPS or name.partition(".")[0] not in DIALECTS:
            raise WireError(f"program {program!r} does {name!r}, which a program from another process may not")
