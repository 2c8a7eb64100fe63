"""A file that is complete or absent, with any number of writers and any failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflow.distributed.process.run_folder import write_whole_file


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
