"""Check the sdist and the wheel: their contents, and that the wheel works in an empty environment.

    python tests/check_wheel.py dist --constraints constraints/python3.11.txt
    python tests/check_wheel.py dist --every

The first installs the wheel with pinned packages into this Python, the second with the newest ones into each Python
from 3.11 on that is on this machine. Needs only the standard library and pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("tracing", "lowering", "distributed")
STATIC = "dflow/dashboard/static/"

# Runs in isolated mode and from an empty folder, so that Python finds only what the wheel installed.
TRIAL = """
import importlib.util
import dflow, dflow.tracing, dflow.lowering, dflow.distributed
for name in ("tracing", "lowering", "distributed"):
    assert importlib.util.find_spec(name) is None, f"the wheel put {name!r} at the top level"
import jax, jax.numpy as jnp, optax
w = dflow.Variable(lambda: jnp.zeros(3), name="w")
optimizer = dflow.Optimizer(optax.adam(1e-3), [w])

@dflow.jit
def step(x):
    loss, gradients = dflow.value_and_grad(lambda: ((x @ w - 1) ** 2).sum(), [w])()
    optimizer.apply(gradients)
    return loss

assert step(jnp.ones((2, 3))) > step(jnp.ones((2, 3)))
print("dflow", dflow.__version__, "trains on JAX", jax.__version__)
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


def licence_files() -> set[str]:
    """Paths of the licences that pyproject.toml lists, for dflow and for files of others in it."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    return {path.relative_to(ROOT).as_posix() for pattern in listed for path in ROOT.glob(pattern)}


def expected_static() -> set[str]:
    """Names of the built files that the dashboard serves and notebooks show."""
    return {f"{STATIC}{path.name}" for path in (ROOT / STATIC).iterdir()}


def check_wheel(path: Path) -> None:
    """The wheel contains all of dflow/ and its metadata, and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    check_same(path, {name for name in names if name.endswith(".py")}, expected_modules())
    check_same(path, {name for name in names if name.startswith(STATIC)}, expected_static())
    strangers = {name for name in names if name.split("/")[0] != "dflow" and ".dist-info/" not in name}
    check_same(path, strangers, set())
    licences = {name.split("/", 1)[1] for name in names if "/licenses/" in name}
    check_same(path, licences, {f"licenses/{name}" for name in licence_files()})


def check_sdist(path: Path) -> None:
    """The sdist contains no links, all of dflow/, and otherwise only files for the build."""
    with tarfile.open(path) as sdist:
        members = [member for member in sdist.getmembers() if not member.isdir()]
    check_same(path, {member.name for member in members if not member.isreg()}, set())
    names = {member.name.split("/", 1)[1] for member in members}
    check_same(path, {name for name in names if name.endswith(".py")}, expected_modules())
    beside = {name.split("/")[0] for name in names} - {"dflow", "dflow.egg-info"}
    others = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    check_same(path, beside, others)


def check_same(path: Path, found: set[str], wanted: set[str]) -> None:
    """Exit with the difference if `path` does not contain the expected files."""
    if found != wanted:
        sys.exit(f"{path.name}: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}")


def check_installed(path: Path, python: str, constraints: Path | None = None) -> str:
    """The wheel installs into an empty environment of `python`, trains there, and its command answers.

    Returns what it printed. Without `constraints`, the newest packages are installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", "--without-pip", folder, cwd=folder)
        programs = Path(folder) / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-compile"]
        pins = ("--constraint", str(constraints.resolve())) if constraints else ()
        run(*pip, *pins, str(path.resolve()), cwd=folder)
        printed = run(str(programs / "python"), "-I", "-c", TRIAL, cwd=folder)
        run(str(programs / "dflow"), "--help", cwd=folder)
        run(str(programs / "dflow"), "doctor", cwd=folder)
        return printed


def every_python() -> dict[str, str]:
    """Return the Pythons from 3.11 on that are on PATH or beside this one, by version such as 3.13."""
    beside = Path(sys.base_prefix).parent.glob("3.*/bin/python3")
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    found: dict[str, str] = {}
    for python in [sys.executable, *filter(None, named), *map(str, sorted(beside))]:
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, timeout=60)
        version = said.stdout.strip()
        # A version manager may put a name on PATH that only explains how to enable it.
        if said.returncode == 0 and re.fullmatch(r"3\.\d+", version) and int(version[2:]) >= 11:
            found.setdefault(version, python)
    return dict(sorted(found.items(), key=lambda item: int(item[0][2:])))


def run(*command: str, cwd: str) -> str:
    """Run `command` and return its output; exit with that if it fails."""
    # With the sources on the path, pip would take dflow for installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, check=False, timeout=600)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def only(folder: Path, pattern: str) -> Path:
    """The one file of `folder` that matches."""
    [path] = folder.glob(pattern)
    return path


def main() -> None:
    """Check both files in the folder."""
    parser = argparse.ArgumentParser(description="check the built sdist and wheel")
    parser.add_argument("dist", type=Path, help="folder with one sdist and one wheel")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--constraints", type=Path, help="pins for the clean environment of this Python")
    how.add_argument("--every", action="store_true", help="each Python that is here, with the newest packages")
    args = parser.parse_args()
    check_sdist(only(args.dist, "*.tar.gz"))
    wheel = only(args.dist, "*.whl")
    check_wheel(wheel)
    pythons = every_python() if args.every else {"this Python": sys.executable}
    for version, python in pythons.items():
        print(f"{version}: {check_installed(wheel, python, args.constraints)}", flush=True)
    print(f"{wheel.name}: whole, alone under its name, and works in a clean environment")


if __name__ == "__main__":
    main()
