"""The runner on a folder of small test files, in real processes; its comparisons without processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.jax_suite.__main__ import main
from tests.jax_suite.child import last_line
from tests.jax_suite.compare import Exceptions, FileComparison
from tests.jax_suite.process import FileRun, Limits, Outcome, run_file

pytestmark = pytest.mark.long

FILE = """
    import os, threading
    import jax, jax.experimental.pjit, pytest
    from jax import jit
    from jax.experimental.pjit import pjit

    REPLACED = "dflow" in repr(jit(lambda x: x))

    def test_equal():
        assert jit(lambda x: x + 1)(1) == 2

    def test_that_differs():
        assert not REPLACED, "this is dflow's"

    @pytest.mark.parametrize("x", [1, 2])
    def test_that_differs_and_is_listed(x):
        assert not REPLACED

    def test_fails_both_ways():
        assert jax.jit(lambda x: x + 1)(1) == 3

    def test_that_crashes():
        if REPLACED:
            os.abort()

    def test_that_hangs():
        if REPLACED:
            threading.Event().wait()

    def test_that_is_skipped():
        if REPLACED:
            pytest.skip("not here")

    def test_every_name_is_replaced():
        assert ("dflow" in repr(jax.jit(abs))) == ("dflow" in repr(pjit(abs))) == REPLACED
        assert pjit(lambda x: x * 2, None)(2) == 4

    def test_after_all():
        pass
"""
LISTED = """
    [made]
    "made_test.py::test_that_differs_and_is_listed[[]*" = "on purpose"
    "made_test.py::test_equal" = "differed once"
    "other_test.py::*" = "of a file that is not run"
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small test file, exceptions, and the report of a run."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "made_test.py").write_text(textwrap.dedent(FILE))
    (folder / "listed.toml").write_text(textwrap.dedent(LISTED).replace("[[]", "["))
    return folder


def run(folder: Path, *more: str) -> int:
    listed, report = str(folder / "listed.toml"), str(folder / "report.json")
    return main([str(folder), "made_test.py", "--suite", "made", "--exceptions", listed, "--json", report, *more])


def test_both_runs_are_compared_past_crashes_and_hangs(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ran, "--test-timeout", "4") == 1
    report = json.loads((ran / "report.json").read_text())
    found = report["files"]["made_test.py"]
    assert found["outcomes_with_jax"] == {"passed": 9, "failed": 1}
    ends = {name.split("::")[1]: one["outcome"] for name, one in found["differing"].items()}
    assert ends == {
        "test_that_differs": "failed",
        "test_that_differs_and_is_listed[1]": "failed",
        "test_that_differs_and_is_listed[2]": "failed",
        "test_that_crashes": "crashed",
        "test_that_hangs": "hung",
        "test_that_is_skipped": "skipped",
    }
    assert (report["passed_with_jax"], report["passed_with_dflow"]) == (9, 3)
    assert report["traced_by_dflow"] == 2
    assert report["stale_exceptions"] == ["made_test.py::test_equal"]
    said = capsys.readouterr().out
    assert re.search(r"^made_test.py +9 +3 +6 +2 +2$", said, re.MULTILINE)
    assert "AssertionError: this is dflow's" in said
    assert "the process died by SIGABRT" in said
    assert re.search(r"took longer than 4 s: File .* in wait", said)
    assert "listed: on purpose" in said
    assert "stale exception, no test differs by it any more: made_test.py::test_equal" in said


def test_a_run_without_unlisted_differences_succeeds(ran: Path) -> None:
    assert run(ran, "--", "-k", "listed or both_ways or after_all") == 0
    report = json.loads((ran / "report.json").read_text())
    assert (report["passed_with_dflow"], report["stale_exceptions"]) == (1, [])


def test_a_file_that_cannot_be_imported_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad_test.py").write_text("import a_module_that_is_missing\n")
    assert main([str(tmp_path), "bad_test.py"]) == 2
    said = capsys.readouterr().out
    assert "bad_test.py with jax.jit: ModuleNotFoundError: No module named 'a_module_that_is_missing'" in said
    assert "pip install 'dflow[jax-suite]'" in said
    assert "nothing was compared" in said


def test_a_file_has_a_time_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "long_test.py").write_text(
        "import threading\ndef test_first():\n    pass\ndef test_long():\n    threading.Event().wait()\n"
    )
    found = run_file("long_test.py", "jax", tmp_path, Limits(test=100, file=8))
    assert found.trouble == "the 8 s of the file were up in long_test.py::test_long"
    assert [name for name, one in found.tests.items() if one.outcome == "passed"] == ["long_test.py::test_first"]


QUICK = "def test_one():\n    pass\n"


def test_files_of_subfolders_are_found_and_absent_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pallas").mkdir()
    for name in ("a_test.py", "pallas/b_test.py"):
        (tmp_path / name).write_text(QUICK)
    monkeypatch.setattr("tests.jax_suite.__main__.DEFAULT", ("a_test.py", "pallas/b_test.py", "gone_test.py"))
    passed = FileRun({"test_one": Outcome("passed")})
    monkeypatch.setattr("tests.jax_suite.__main__.run_file", lambda *_, **__: passed)
    assert main([str(tmp_path), "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert f"not in {tmp_path}, which is of another version: gone_test.py\n" in said
    progress = r"^\[\d/2\] (a|pallas/b)_test.py: 1 with jax.jit, 0 of them not with dflow.jit$"
    assert len(re.findall(progress, said, re.MULTILINE)) == 2
    assert said.index("\na_test.py ") < said.index("\npallas/b_test.py ") < said.index("\nin all ")


def test_a_runner_that_is_told_to_end_leaves_no_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    (tmp_path / "long_test.py").write_text(
        "import pathlib, threading\n"
        "alive = pathlib.Path(__file__).with_name('alive').open('w')\n"
        "print('begun', file=alive, flush=True)\n"
        "threading.Event().wait()\n"
    )
    runner = subprocess.Popen([sys.executable, "-m", "tests.jax_suite", str(tmp_path), "long_test.py"])
    with (tmp_path / "alive").open() as alive:
        assert alive.readline() == "begun\n"
        runner.terminate()
        assert alive.read() == ""  # which ends when the process that has the other end ends
    assert runner.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_test_that_did_not_run_differs() -> None:
    plain = FileRun({"a::b": Outcome("passed"), "a::c": Outcome("failed")})
    compared = FileComparison("a", plain, FileRun({}, "ImportError: no"))
    assert compared.differing == {"a::b": Outcome("not run", "ImportError: no")}
    assert compared.unlisted(Exceptions({})) == ["a::b"]
    assert compared.unlisted(Exceptions({"a::*": "because"})) == []


def test_an_exception_of_a_test_that_was_not_selected_is_not_stale() -> None:
    passed = FileRun({"a::b": Outcome("passed")})
    compared, exceptions = [FileComparison("a", passed, passed)], Exceptions({"a::b": "because", "a::c": "because"})
    assert exceptions.stale(compared) == ["a::b", "a::c"]
    assert exceptions.stale(compared, selected=True) == ["a::b"]


def test_the_last_line_of_an_error_is_the_one_that_names_it() -> None:
    text = "    def f():\n>       g()\nE       TypeError: no\nE         more about it\n\nfile.py:3: TypeError"
    assert last_line(text) == "TypeError: no"
    assert last_line(f"{text}\n\nDuring handling of the above exception:\nE    KeyError: 'k'") == "KeyError: 'k'"
    assert last_line("") == ""
