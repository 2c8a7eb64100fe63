"""What a launched task compiles is kept for the next start."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from dflow.cli.launch_command import _cache_news
from dflow.distributed.launching.compilation_cache import FOLDER_VARIABLE, SWITCH_VARIABLE, cache_variables


def test_the_folder_is_private_and_bounded(tmp_path: Path) -> None:
    found = cache_variables({"XDG_CACHE_HOME": str(tmp_path)})
    folder = Path(found[FOLDER_VARIABLE])
    assert folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert int(found["JAX_COMPILATION_CACHE_MAX_SIZE"]) == 2**30
    assert cache_variables({"HOME": str(tmp_path)})[FOLDER_VARIABLE].startswith(f"{tmp_path}/.cache/dflow/")
    folder.chmod(0o777)
    assert not cache_variables({"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.parametrize("name", [FOLDER_VARIABLE, SWITCH_VARIABLE])
def test_the_environment_of_a_task_decides(name: str, tmp_path: Path) -> None:
    assert not cache_variables({"XDG_CACHE_HOME": str(tmp_path), name: "0"})
    assert not os.listdir(tmp_path)


def test_a_program_without_its_time_is_removed(tmp_path: Path) -> None:
    """A killed process leaves it, and JAX fails to keep any other program then."""
    folder = Path(cache_variables({"XDG_CACHE_HOME": str(tmp_path)})[FOLDER_VARIABLE])
    for name in ("whole-cache", "whole-atime", "half-cache"):
        (folder / name).touch()
    assert cache_variables({"XDG_CACHE_HOME": str(tmp_path)})
    assert sorted(os.listdir(folder)) == ["whole-atime", "whole-cache"]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "dflow").touch()
    assert not cache_variables({"XDG_CACHE_HOME": str(tmp_path)})


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", fail)
    assert not cache_variables({})


def test_a_launch_says_where_programs_are_kept(tmp_path: Path) -> None:
    assert _cache_news({"XDG_CACHE_HOME": str(tmp_path)}).startswith("compiled programs are kept for later starts in")
    assert not _cache_news({"XDG_CACHE_HOME": str(tmp_path), SWITCH_VARIABLE: "0"})
    (tmp_path / "file").touch()
    assert _cache_news({"XDG_CACHE_HOME": str(tmp_path / "file")}).startswith("compiled programs are not kept")
