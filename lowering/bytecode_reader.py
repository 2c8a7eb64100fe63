"""Reading MLIR's bytecode of unknown origin in a separate process, since malformed bytecode crashes its reader.

What comes back is text. The reader of texts has withstood every damage that was tried.
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
    """A function from the bytecode of a module to its text, usable inside the block.

    It raises ValueError for bytecode that cannot be read, and OSError where the system starts no process.
    """
    # The process has to find the same JAX, and nothing that lies beside the script.
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
