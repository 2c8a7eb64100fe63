"""Run as a process: convert MLIR's bytecode to text, so that bytecode that crashes its reader ends only this process.

It imports nothing but JAX's compiler library, which takes a tenth of a second. A request is the length of a module in 8
bytes, and the module; an answer is a byte that says whether it is the text or what was wrong, the length, and that.
"""

from __future__ import annotations

import resource
import signal
import sys
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

#: Seconds for one module. The text of 100 MB takes a few.
DEADLINE_S = 120


def main() -> None:
    """Answer requests until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ask, answer = sys.stdin.buffer, sys.stdout.buffer
    while head := ask.read(8):
        module = ask.read(int.from_bytes(head, "little"))
        signal.alarm(DEADLINE_S)
        is_text, said = _text(module)
        signal.alarm(0)
        answer.write(bytes([is_text]) + len(said).to_bytes(8, "little") + said)
        answer.flush()


def _text(module: bytes) -> tuple[bool, bytes]:
    context: Any = ir.Context()
    with context:
        for dialect in (chlo, sdy, stablehlo):
            dialect.register_dialect(context)
        try:
            parsed: Any = _jax.mlir.deserialize_portable_artifact(module)
            return True, parsed.operation.get_asm(enable_debug_info=True).encode()
        except Exception as error:  # the reader raises whatever its parts raise
            return False, str(error).encode()


if __name__ == "__main__":
    main()
