"""Two processes that write one folder: neither removes a folder that the other is about to rename."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from dflow.lowering.files import atomic_directory as module
from dflow.lowering.files.atomic_directory import present, whole_folder
from dflow.lowering.files.owner_lock import OwnerLock
from dflow.tracing.errors import CheckpointError, CheckpointExists

MARKER = "marker"
DEADLINE_S = 60

#: A process with the host name and number of its parent, as the first process of another container may have.
WRITER = f"""
import os, platform, sys
os.getpid, platform.node = lambda: 1, lambda: "box"
from dflow.lowering.files.atomic_directory import whole_folder
with whole_folder(sys.argv[1], marker={MARKER!r}, overwrite=True) as folder:
    (folder / {MARKER!r}).write_text("theirs")
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the number and host name of the other writer."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("platform.node", lambda: "box")


def write(path: Path, text: str, *, overwrite: bool = True, meanwhile: Callable[[], None] = lambda: None) -> None:
    with whole_folder(path, marker=MARKER, overwrite=overwrite) as folder:
        (folder / MARKER).write_text(text)
        meanwhile()


def read(path: Path) -> str:
    return (present(path) / MARKER).read_text()


@contextmanager
def writer(path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that writes to `path`, and its staging folder; it completes its save when it reads a line."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, Path(_pipe(process.stdout).readline().rstrip())
        finally:
            process.kill()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def test_a_writer_in_another_container_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(path, "old")
    with writer(path) as (process, staging):
        write(path, "ours")
        assert (staging / MARKER).read_text() == "theirs"
        process.communicate("go on\n", timeout=DEADLINE_S)
        assert process.returncode == 0
    assert read(path) == "theirs"
    assert os.listdir(tmp_path) == ["c"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path) as (process, staging):
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert staging.exists()
    write(path, "ours")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "renamed"])
def test_where_locks_do_not_reach_a_save_fails_and_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Two hosts whose file system does not share locks: a living writer looks ended."""
    if not exchanges:
        monkeypatch.setattr(module, "_exchange", lambda *_: False)
    path = tmp_path / "c"
    write(path, "old")
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"was emptied while it was written\n  at .*\n  what was there before"):
        write(path, "lost", meanwhile=lambda: write(path, "ours"))
    assert read(path) == "ours"
    assert os.listdir(tmp_path) == ["c"]


def test_without_locks_a_save_succeeds_and_removes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuses)
    path = tmp_path / "c"

    def other() -> None:
        assert not [entry for entry in os.listdir(tmp_path) if entry.endswith("lock")]
        write(path, "inner")
        assert read(path) == "inner"

    write(path, "outer", meanwhile=other)
    assert read(path) == "outer"
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("had", ["", "old"])
def test_of_two_writers_the_later_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, had: str
) -> None:
    if not exchanges:
        monkeypatch.setattr(module, "_exchange", lambda *_: False)
    path = tmp_path / "c"
    if had:
        write(path, had)
    write(path, "later", meanwhile=lambda: write(path, "earlier"))
    assert read(path) == "later"
    assert os.listdir(tmp_path) == ["c"]


def test_another_that_appears_while_the_old_one_is_aside_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_exchange", lambda *_: False)
    path, rename = tmp_path / "c", os.rename
    write(path, "old")

    def interrupted(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name.endswith(".replaced"):
            monkeypatch.setattr(os, "rename", rename)
            write(path, "theirs")

    monkeypatch.setattr(os, "rename", interrupted)
    write(path, "ours")
    assert read(path) == "ours"
    assert os.listdir(tmp_path) == ["c"]


def test_a_folder_that_appears_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(CheckpointExists, match="was made while this was written"):
        write(path, "ours", overwrite=False, meanwhile=lambda: write(path, "theirs"))
    assert read(path) == "theirs"


def test_an_empty_folder_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointExists, match="exists"):
        write(tmp_path / "c", "new", overwrite=False)
    write(tmp_path / "c", "new")
    assert read(tmp_path / "c") == "new"


def test_a_link_of_a_hidden_name_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    (tmp_path / f".c.{'0' * 16}.lock").touch()
    (tmp_path / f".c.{'0' * 16}.writing").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / f".c.{'1' * 16}.lock")
    write(tmp_path / "c", "new")
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "x"
    assert not (tmp_path / f".c.{'0' * 16}.writing").is_symlink()


def test_what_is_being_removed_can_no_longer_be_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, staging, unlink = tmp_path / "c", tmp_path / f".c.{'0' * 16}.writing", os.unlink
    for folder in (path, staging):
        folder.mkdir()
        (folder / MARKER).write_text("whole")
        (folder / "more").write_text("whole")
    (tmp_path / f".c.{'0' * 16}.lock").touch()

    def interrupted(file: str) -> None:
        unlink(file)
        with suppress(OSError):
            module._exchange(staging, path)

    monkeypatch.setattr(os, "unlink", interrupted)
    module._tidy(path)
    assert sorted(os.listdir(path)) == [MARKER, "more"]
    assert os.listdir(tmp_path) == ["c"]


def test_a_lock_is_taken_over_only_once_its_owner_has_released_it(tmp_path: Path) -> None:
    lock = OwnerLock.make(tmp_path / "lock")
    assert lock is not None
    assert OwnerLock.take_over(tmp_path / "lock") is None
    with pytest.raises(FileExistsError):
        OwnerLock.make(tmp_path / "lock")
    lock.release(remove=False)
    taken = OwnerLock.take_over(tmp_path / "lock")
    assert taken is not None
    taken.release(remove=True)
    assert OwnerLock.take_over(tmp_path / "lock") is None
    assert os.listdir(tmp_path) == []
