"""Commands that need no cluster: `dflow doctor`, `new`, `completion`, and each of the documentation as it is parsed."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dflow import __version__
from dflow.__main__ import main, make_parser
from dflow.cli.local import doctor_checks
from dflow.cli.local.doctor import show
from dflow.cli.local.doctor_checks import Diagnosis, clock, devices, extras, fits, limits, network, versions
from dflow.cli.local.new_project import new_project
from dflow.tracing.errors import ConfigError


@pytest.mark.once
def test_on_a_machine_where_all_is_well_the_status_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "dflow doctor: nothing is wrong"
    for text in ("Python 3.", "jax ", "cores: ", "loopback: connects", "clock: ", "devices: cpu:0 "):
        assert any(line.startswith("ok") and text in line for line in lines), text


def test_what_is_wrong_has_its_remedy_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert show([Diagnosis("ok", "fine"), Diagnosis("note", "odd", "try"), Diagnosis("wrong", "bad", "mend")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok     fine",
        "note   odd",
        "       -> try",
        "wrong  bad",
        "       -> mend",
        "dflow doctor: 1 wrong, with the remedies above",
    ]


@pytest.mark.parametrize(
    ("version", "specifiers", "expected"),
    [
        ("0.10.2", ">=0.10.2,<0.13", True),
        ("0.12.0.dev20260101", "<0.13,>=0.10.2", True),
        ("0.13.0", ">=0.10.2,<0.13", False),
        ("0.9.9", ">=0.10.2,<0.13", False),
        ("24.3.25", ">=24", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, specifiers: str, expected: bool) -> None:
    assert fits(version, specifiers) is expected


def test_a_package_that_does_not_fit_is_wrong_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["jax<0.13,>=0.10.2", "absent>=2", 'prometheus-absent>=0.20; extra == "metrics"', 'x; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    actual = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.1" if name == "jax" else actual(name))
    wrong = [each for each in versions() if each.level != "ok"]
    assert wrong == [
        Diagnosis("wrong", "jax 0.13.1: expected <0.13,>=0.10.2", "pip install 'jax<0.13,>=0.10.2'"),
        Diagnosis("wrong", "absent is not installed", "pip install 'absent>=2'"),
    ]
    assert list(extras()) == [
        Diagnosis("note", "extra metrics: without prometheus-absent", "pip install 'dflow[metrics]'")
    ]


def test_devices_that_do_not_answer_in_time_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_DEVICES", "import threading; threading.Event().wait()")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    [found] = devices(0.1)
    assert (found.level, found.text) == ("wrong", "devices: JAX did not list them within 0.1 s (JAX_PLATFORMS=cuda)")
    assert "JAX_PLATFORMS=cpu" in found.remedy


def test_an_error_of_jax_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_DEVICES", "raise RuntimeError('jaxlib 0.9 is too old')")
    [found] = devices(60)
    assert found.level == "wrong"
    assert found.text.endswith("RuntimeError: jaxlib 0.9 is too old")
    monkeypatch.setattr(doctor_checks, "_DEVICES", "assert False")
    [found] = devices(60)
    assert found.text.endswith("there is no device of this platform, or no plugin of JAX for it")
    assert "pip install 'jax[cuda12]'" in found.remedy


def test_too_few_files_too_little_memory_and_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    monkeypatch.setattr(doctor_checks, "_available_memory", lambda: 5_000_000)
    monkeypatch.setattr(os, "memfd_create", refuse)
    found = [each for each in limits() if each.level != "ok"]
    assert [(each.level, each.text) for each in found] == [
        ("wrong", "memory: 5.0 MB available: expected at least 1.0 GB"),
        ("wrong", "open files: at most 256, raised up to 256 when needed: expected at least 1024"),
        ("note", "shared memory between processes: Operation not permitted"),
    ]
    assert all(each.remedy for each in found)


@pytest.mark.parametrize("lists_cache", [True, False])
def test_the_page_cache_of_a_container_is_memory_that_is_available(
    lists_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
        "/sys/fs/cgroup/memory.max": "4294967296\n",
        "/sys/fs/cgroup/memory.current": "4200000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 100\nfile 4000000000\ninactive_file 3900000000\nactive_file 7\n",
    }
    if not lists_cache:
        del texts["/sys/fs/cgroup/memory.stat"]
    with_files(texts, monkeypatch)
    [memory] = [each for each in limits() if each.text.startswith("memory")]
    assert memory.level == ("ok" if lists_cache else "wrong")
    assert memory.text.startswith(f"memory: {'4.0 GB' if lists_cache else '95.0 MB'} available")


def test_a_kernel_that_does_not_tell_the_available_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for texts in ({"/proc/meminfo": "MemTotal: 8 kB\n"}, dict[str, str]()):
        with_files(texts, monkeypatch)
        [memory] = [each for each in limits() if "memory: " in each.text]
        assert (memory.level, memory.text) == ("note", "memory: /proc/meminfo does not tell how much is available")
        assert memory.remedy


def with_files(texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the text files that are read by these."""

    def read_text(path: Path) -> str:
        if str(path) not in texts:
            raise FileNotFoundError(2, "No such file", str(path))
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_no_loopback_is_wrong_and_a_name_without_address_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("Network is unreachable")

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = list(network())
    assert [each.level for each in found] == ["wrong", "note"]
    assert "Network is unreachable" in found[0].text
    assert "Name or service not known" in found[1].text


def test_a_clock_before_the_installation_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    [now] = clock()
    assert now.level == "ok"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    [found] = clock()
    assert found.level == "wrong"
    assert "1970-01-01" in found.text


def test_a_new_project_passes_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "ring_finder"]) == 0
    monkeypatch.syspath_prepend(tmp_path / "ring_finder")
    tests = importlib.import_module("test_ring_finder")
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert names == ["test_training_in_one_process", "test_training_on_a_cluster"]
    for name in names:
        getattr(tests, name)()
    for module in ("test_ring_finder", "ring_finder"):
        del sys.modules[module]


def test_a_new_project_has_a_readme_and_asks_for_this_version(tmp_path: Path) -> None:
    said = new_project("rings", tmp_path)
    folder = tmp_path / "rings"
    files = [".gitignore", "README.md", "pyproject.toml", "rings.py", "test_rings.py"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert f'"dflow>={__version__}"' in (folder / "pyproject.toml").read_text()
    assert "$" not in "".join(file.read_text() for file in folder.iterdir())
    documented = ast.get_docstring(ast.parse((folder / "rings.py").read_text())) or ""
    assert "dflow launch --ps 1 --workers 2 rings.py" in documented
    assert "cd rings" in said


@pytest.mark.parametrize(
    ("name", "fact", "remedy"),
    [
        ("My-Rings", "expected the name of a Python module in lower case, got 'My-Rings'", "such as my_rings"),
        ("class", "expected the name of a Python module in lower case, got 'class'", "such as my_project"),
        ("../rings", "expected the name of a Python module in lower case, got '../rings'", "such as rings"),
        ("json", "expected one that no installed module has, got 'json'", "such as my_json"),
        ("taken", r"expected a new one, but .*taken exists", "choose another name, or remove it"),
    ],
)
def test_a_name_that_cannot_be_a_new_module_is_refused_and_nothing_is_written(
    name: str, fact: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=rf"(?s){fact}.*{remedy}"):
        new_project(name, tmp_path)
    assert [file.name for file in tmp_path.rglob("*")] == ["taken"]


TRY = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_dflow dflow "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "dflow.bash"
    with pytest.MonkeyPatch.context() as patched, path.open("w") as file:
        patched.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dflow", "la"], {"launch"}),
        (["dflow", "launch", "--worker"], {"--workers", "--worker-resources"}),
        (["dflow", "launch", "--on", ""], {"this-machine", "ray", "ssh"}),
        (["dflow", "certs", "i"], {"init", "issue"}),
        (["dflow", "launch", "tr"], {"train.py"}),
        (["dflow", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes_commands_options_choices_and_files(
    script: Path, words: list[str], expected: set[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    ran = subprocess.run(
        ["bash", "-c", TRY, "bash", str(script), *words],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True,
    )  # fmt: skip
    assert set(ran.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_their_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    assert "snapshot-every" in capsys.readouterr().out


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    actual = builtins.__import__

    def without_shtab(name: str, *rest: Any) -> Any:
        if name == "shtab":
            raise ModuleNotFoundError(name=name)
        return actual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_shtab)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'dflow[completion]'" in capsys.readouterr().err


ROOT = Path(__file__).parents[3]
#: A line of a block of code, with variables set before the command.
COMMAND = re.compile(r"^ {4,}(?:\$ )?(?:[A-Z_]+=\S+ )*dflow (.*)$", re.MULTILINE)


def commands() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for found in COMMAND.finditer(page.read_text().replace("\\\n", " ")):
            yield page.name, found[1]


def test_the_commands_of_the_documentation_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    refused, count = [], 0
    for page, text in commands():
        words = shlex.split(text, comments=True)
        words = words[: next((index for index, word in enumerate(words) if word in ("&", "|", ">", "&&", "...")), None)]
        count += 1
        try:
            make_parser().parse_args(words)
        except SystemExit as end:
            if end.code:
                refused.append(f"{page}: dflow {text}: {capsys.readouterr().err.splitlines()[-1]}")
    assert count > 50
    assert refused == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lunch"], "invalid choice 'lunch'; did you mean launch?"),
        (["certs", "isue"], "invalid choice 'isue'; did you mean issue?"),
        (["launch", "--on", "rya", "train.py"], "argument --on: invalid choice 'rya'; did you mean ray?"),
        (["completion", "powershell"], "invalid choice 'powershell'; choose from"),
        (["zzz"], "invalid choice 'zzz'; choose from launch, task, coordinator"),
    ],
)
def test_a_misspelt_command_or_choice_gets_a_suggestion(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return the first and the last line of the error of `dflow show`."""
    assert main(["show", str(path)]) == 1
    fact, *_, remedy = capsys.readouterr().err.splitlines()
    return fact, remedy


def test_show_of_a_folder_that_is_no_export_names_a_few_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(300):
        (tmp_path / f"file{index:03}").touch()
    there = "file000, file001, file002 and 297 more"
    assert shown(tmp_path, capsys) == (
        f"dflow show: {tmp_path} holds no export: it has no manifest.json, but {there}",
        "  give the directory that dflow.export(...).save wrote",
    )
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "manifest.json").write_text("{}")
    fact, remedy = shown(tmp_path, capsys)
    assert fact.endswith("holds no export itself, but 1 in it")
    assert remedy == f"  give one of them, such as {tmp_path / '1'}"
    (tmp_path / "1" / "manifest.json").rename(tmp_path / "1" / "dflow.json")
    fact, remedy = shown(tmp_path / "1", capsys)
    assert fact.endswith("is a checkpoint, and no export")
    assert remedy == "  dflow.restore reads it"
