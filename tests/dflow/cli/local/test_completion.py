import builtins
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dflow.__main__ import main

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
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
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
