"""Run as a process: convert MLIR's bytecode to text, so that bytecode that crashes its reader ends only this process.

It imports nothing but JAX's compiler library, which takes 0.1 s. A request is the length of a module in 8 bytes and the
module. An answer is a byte, which is 1 for a text and 0 for an error message, the length in 8 bytes, and the text or
message.
"""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

#: Limits for one module, besides a share by its size. A module with one damaged byte has taken 8 GB, and minutes.
PROCESSOR_S = 1
MEMORY_BYTES = 1 << 30
#: Constants of 100 MB take a second and 0.6 GB to become text.
BYTES_PER_S = 10_000_000
MEMORY_PER_BYTE = 30


def main() -> None:
    """Answer requests until there are no more, or one exceeds the limits, which ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ask, answer = sys.stdin.buffer, sys.stdout.buffer
    while head := ask.read(8):
        module = ask.read(int.from_bytes(head, "little"))
        _limit_use(len(module))
        is_text, said = _text(module)
        answer.write(bytes([is_text]) + len(said).to_bytes(8, "little") + said)
        answer.flush()


def _limit_use(size: int) -> None:
    """Set the limits for a module of `size` bytes: the system ends the process, or refuses it memory, beyond them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + PROCESSOR_S + size // BYTES_PER_S)
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES + size * MEMORY_PER_BYTE)


def _lower(limit: int, value: int) -> None:
    """Set a limit of this process, at most the hard limit that it was started with."""
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _text(module: bytes) -> tuple[bool, bytes]:
    context: Any = ir.Context()
    with context:
        for dialect in (chlo, sdy, stablehlo):
            dialect.register_dialect(context)
        try:
            parsed: Any = _jax.mlir.deserialize_portable_artifact(module)
            return True, parsed.operation.get_asm(enable_debug_info=True).encode()
        except Exception as error:  # the reader raises exceptions of any class
            return False, str(error).encode()


if __name__ == "__main__":
    main()
