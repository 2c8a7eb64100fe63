import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dflow.distributed.process.parent_watch import LIFELINE_VARIABLE, ORPHANED, watch
from tests.distributed.processes import Spawned, wait_for_end

CHILD = """
import os, sys, threading
from dflow.distributed.process.parent_watch import watch
print(watch(), watch(), "DFLOW_LIFELINE_FD" in os.environ, flush=True)
threading.Event().wait()
"""


def test_without_a_launcher_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIFELINE_VARIABLE, raising=False)
    assert not watch()
    monkeypatch.setenv(LIFELINE_VARIABLE, "nonsense")
    assert not watch()


def test_a_process_ends_when_the_pipe_closes() -> None:
    read_end, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, LIFELINE_VARIABLE: str(read_end)},
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(read_end)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "True False False\n"
        os.close(write_end)
        assert child.wait(60) == ORPHANED


def test_a_number_that_is_no_pipe_ends_nothing() -> None:
    program = "from dflow.distributed.process.parent_watch import watch; import threading; watch(); "
    program += "[t.join() for t in threading.enumerate() if t.name == 'dflow lifeline']; print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, LIFELINE_VARIABLE: "987"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")


GRANDCHILD = """
import os, threading
from dflow.distributed.process.parent_watch import end_with_parent
end_with_parent()
print("pid", os.getpid(), flush=True)
threading.Event().wait()
"""


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"
    with Spawned("-c", program, cwd=tmp_path) as parent:
        pid = int(parent.read_until("pid")[0].split()[1])
    try:
        wait_for_end([pid])
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
