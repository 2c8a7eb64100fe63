from __future__ import annotations

import os
import select
import sys

import pytest

from dflow.distributed.process.child_process import ChildProcess

DEADLINE_S = 60.0
#: More than a pipe holds.
LINES = 3000


def test_lines_that_nobody_can_take_do_not_make_the_child_wait(caplog: pytest.LogCaptureFixture) -> None:
    def on_line(line: str) -> None:
        raise OSError("no space left")

    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", f"for _ in range({LINES}): print('x' * 100)"]
    child = ChildProcess("talker", command, os.environ, read_end, on_line)
    ended = os.pidfd_open(child.pid)
    assert select.select([ended], [], [], DEADLINE_S)[0]
    assert child.poll() == 0
    assert "no space left" in caplog.text
    for number in (ended, read_end, write_end):
        os.close(number)
