"""The command line accepts every `dflow` command of the documentation, and suggests a name for a misspelt one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflow.__main__ import main, make_parser

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
