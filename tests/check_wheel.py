"""Check the sdist and the wheel: their contents, and that the wheel works in an empty environment.

    python tests/check_wheel.py dist --constraints constraints/python3.11.txt

Needs only the standard library and pip.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("tracing", "lowering", "distributed")

# Runs in isolated mode and from an empty folder, so that Python finds only what the wheel installed.
TRIAL = """
import importlib.util
import dflow, dflow.tracing, dflow.lowering, dflow.distributed
for name in ("tracing", "lowering", "distributed"):
    assert importlib.util.find_spec(name) is None, f"the wheel put {name!r} at the top level"
print("dflow", dflow.__version__, "imported with its layers")
"""


def expected_modules() -> set[str]:
    """Names of all modules of the package after installation."""
    folders = {"dflow": ROOT / "dflow", **{f"dflow/{layer}": ROOT / layer for layer in LAYERS}}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }


def check_wheel(path: Path) -> None:
    """The wheel contains all of dflow/ and its metadata, and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    check_same(path, {name for name in names if name.endswith(".py")}, expected_modules())
    strangers = {name for name in names if name.split("/")[0] != "dflow" and ".dist-info/" not in name}
    check_same(path, strangers, set())


def check_sdist(path: Path) -> None:
    """The sdist contains no links, all of dflow/, and otherwise only files for the build."""
    with tarfile.open(path) as sdist:
        members = [member for member in sdist.getmembers() if not member.isdir()]
    check_same(path, {member.name for member in members if not member.isreg()}, set())
    names = {member.name.split("/", 1)[1] for member in members}
    check_same(path, {name for name in names if name.endswith(".py")}, expected_modules())
    beside = {name.split("/")[0] for name in names} - {"dflow", "dflow.egg-info"}
    check_same(path, beside - {"LICENSE"}, {"MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"})


def check_same(path: Path, found: set[str], wanted: set[str]) -> None:
    """Exit with the difference if `path` does not contain the expected files."""
    if found != wanted:
        sys.exit(f"{path.name}: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}")


def check_installed(path: Path, constraints: Path) -> None:
    """The wheel installs into an empty environment, imports there, and its command answers."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        programs = Path(folder) / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-compile"]
        run(*pip, "--constraint", str(constraints.resolve()), str(path.resolve()), cwd=folder)
        run(str(programs / "python"), "-I", "-c", TRIAL, cwd=folder)
        run(str(programs / "dflow"), "--help", cwd=folder)


def run(*command: str, cwd: str) -> None:
    """Run `command`; exit with its output if it fails."""
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def only(folder: Path, pattern: str) -> Path:
    """The one file of `folder` that matches."""
    [path] = folder.glob(pattern)
    return path


def main() -> None:
    """Check both files in the folder."""
    parser = argparse.ArgumentParser(description="check the built sdist and wheel")
    parser.add_argument("dist", type=Path, help="folder with one sdist and one wheel")
    parser.add_argument("--constraints", type=Path, required=True, help="pins for the clean environment")
    args = parser.parse_args()
    check_sdist(only(args.dist, "*.tar.gz"))
    wheel = only(args.dist, "*.whl")
    check_wheel(wheel)
    check_installed(wheel, args.constraints)
    print(f"{wheel.name}: whole, alone under its name, and works in a clean environment")


if __name__ == "__main__":
    main()
