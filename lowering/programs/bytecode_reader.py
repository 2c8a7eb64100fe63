"""Convert MLIR's bytecode of unknown origin to text, in a separate process: malformed bytecode crashes its reader.

The reader of texts has not crashed in any test with damaged input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SCRIPT = Path(__file__).with_name("read_bytecode.py")


@contextmanager
def bytecode_reader() -> Iterator[Callable[[bytes], str]]:
    """Yield a function that converts the bytecode of a module to text.

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
