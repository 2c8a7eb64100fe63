"""What a process asks of its system: files, children, memory, its parent's end, and signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dflow.distributed.process.child_process import ChildProcess
from dflow.distributed.process.parent_watch import LIFELINE_VARIABLE, ORPHANED, watch
from dflow.distributed.process.run_folder import write_whole_file
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


WAIT = """
import threading
from dflow.distributed.process.stop_signal import StopSignal
stop = StopSignal()
print("ready")
{extra}
print(stop.wait_for_exit_status())
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_gives_its_exit_status(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with Spawned("-c", WAIT.format(extra=""), cwd=tmp_path) as spawned:
        spawned.read_until("ready")
        spawned.process.send_signal(number)
        assert spawned.finish() == (0, f"ready\n({status}, '')\n")


FAULT = "threading.Thread(target=lambda: (stop.stop('first'), stop.stop('again'))).start()"
DEADLINE = "print(stop.wait(0.01)); stop.stop('over')"
OTHER = "import signal as s; s.signal(s.SIGUSR2, lambda *_: stop.stop('told')); s.raise_signal(s.SIGUSR2)"


def test_without_such_a_signal_a_fault_or_the_deadline_ends_the_wait(tmp_path: Path) -> None:
    for extra, output in ((FAULT, "(1, 'first')\n"), (DEADLINE, "None\n(1, 'over')\n"), (OTHER, "(1, 'told')\n")):
        with Spawned("-c", WAIT.format(extra=extra), cwd=tmp_path) as spawned:
            assert spawned.finish() == (0, f"ready\n{output}")


# A file that is complete or absent, with any number of writers and any failures.


def test_the_later_of_two_writers_stays_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "dump.txt", Path.replace

    def interrupted(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_whole_file(path, b"theirs, in the meantime")
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    write_whole_file(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["dump.txt"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(part: Path, target: Path) -> Path:
        raise OSError("no room")

    write_whole_file(tmp_path / "a", b"old")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no room"):
        write_whole_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


# A process retains the memory that it has freed.


FAULTS = """
import ctypes, resource
from dflow.distributed.process.freed_memory import LARGEST_BYTES, keep_freed_memory
keep_freed_memory(has_threads={has_threads})
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def fill():
    blocks = [libc.malloc(LARGEST_BYTES // 2) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, LARGEST_BYTES // 2)
    for block in blocks:
        libc.free(block)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("has_threads", "has_settings"),
    [(False, False), (True, False), (False, True)],
    ids=["of a task", "of a worker", "with the user's settings"],
)
def test_memory_that_was_freed_is_used_again_without_page_faults(has_threads: bool, has_settings: bool) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    # With this setting, which must stay in effect, glibc returns blocks of this size.
    environment = kept | ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if has_settings else {})
    words = [sys.executable, "-c", FAULTS.replace("{has_threads}", str(has_threads))]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    pages = 5 * 4 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert (int(ran.stdout) > pages / 2) is has_settings
