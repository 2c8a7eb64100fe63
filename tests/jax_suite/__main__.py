"""python -m tests.jax_suite FOLDER [FILE ...] [options] [-- pytest arguments]

Runs each test file below FOLDER twice, in processes of its own: with `jax.jit`, and with `dflow.jit` in its place.
Prints a table and each test that passes with the one and not with the other. Ends with 1 when one of those is not
listed in exceptions.toml, and with 2 when nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.jax_suite.compare import Exceptions, FileComparison, differences, table
from tests.jax_suite.jax_files import DEFAULT
from tests.jax_suite.process import FileRun, Limits, run_file


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what is for pytest."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m tests.jax_suite", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="where the test files are: the tests of a checkout of JAX, or others'"
    )
    parser.add_argument("files", nargs="*", help="paths below it; without any, those of JAX's that are about jit")
    parser.add_argument("--suite", default="jax", help="the table of exceptions.toml that holds for these files")
    parser.add_argument("--exceptions", type=Path, default=Path(__file__).with_name("exceptions.toml"))
    parser.add_argument("--test-timeout", type=float, default=Limits.test, metavar="SECONDS")
    parser.add_argument("--file-timeout", type=float, default=Limits.file, metavar="SECONDS")
    parser.add_argument(
        "--version-of", action="append", default=[], metavar="PACKAGE", help="note its version in the JSON; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_intermixed_args(argv[:at]), list(argv[at + 1 :])


def main(argv: Sequence[str]) -> int:
    """Run, print, and say how it went."""
    options, for_pytest = parsed(argv)
    root: Path = options.folder.resolve()
    exceptions = Exceptions.of(options.exceptions, options.suite)
    files = chosen(root, options.files)
    if not files:
        print(f"no test file of {len(options.files) or len(DEFAULT)} is in {root}; say a folder that holds them")
        return 2
    limits = Limits(options.test_timeout, options.file_timeout)
    compared = []
    for file in files:
        plain, replaced = (run_file(file, way, root, limits, for_pytest) for way in ("jax", "dflow"))
        compared.append(one := FileComparison(file, plain, replaced))
        print(f"{file}: {len(one.passed)} with jax.jit, {len(one.differing)} of them not with dflow.jit", flush=True)
        if options.json:  # after each file, since a whole suite takes long
            options.json.write_text(json.dumps(report(options, for_pytest, compared, exceptions), indent=2) + "\n")
    print("\n" + table(compared, exceptions))
    for text in (differences(compared, exceptions), troubles(compared)):
        if text:
            print("\n" + text)
    for pattern in exceptions.stale(compared):
        print(f"stale exception, no test differs by it any more: {pattern}")
    if not any(one.passed for one in compared):
        print("nothing was compared: no test passes with jax.jit")
        return 2
    return int(any(one.unlisted(exceptions) for one in compared))


def chosen(root: Path, files: Sequence[str]) -> list[str]:
    """The files asked for, folders taken apart; of the default ones those that are there. Raises SystemExit."""
    if not files:
        return [file for file in DEFAULT if (root / file).is_file()]
    found: list[str] = []
    for file in files:
        path = root / file
        if not path.exists():
            raise SystemExit(f"{path} does not exist; name files and folders below {root}")
        inside = sorted({*path.rglob("*_test.py"), *path.rglob("test_*.py")}) if path.is_dir() else [path]
        found += [one.relative_to(root).as_posix() for one in inside]
    return found


def troubles(compared: Sequence[FileComparison]) -> str:
    """What kept a file from being run whole, each way, with what to install where that is it."""
    lines = []
    for one in compared:
        for way, run in (("jax.jit", one.plain), ("dflow.jit", one.replaced)):
            if run.trouble:
                lines.append(f"{one.file} with {way}: {run.trouble}{remedy(run)}")
    return "\n".join(lines)


def remedy(run: FileRun) -> str:
    """What to install, if a module is missing."""
    missing = re.search(r"No module named '(\w+)", run.trouble)
    if missing is None:
        return ""
    return f"\n  install what the suite needs: pip install 'dflow[jax-suite]' for JAX's, or what has {missing[1]}"


def report(
    options: argparse.Namespace,
    for_pytest: Sequence[str],
    compared: Sequence[FileComparison],
    exceptions: Exceptions,
) -> dict[str, object]:
    """Everything measured, with the versions it was measured with."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", *options.version_of)}
    return {
        "suite": options.suite,
        "versions": {"python": platform.python_version(), **versions},
        "pytest_arguments": list(for_pytest),
        "passed_with_jax": sum(len(one.passed) for one in compared),
        "passed_with_dflow": sum(len(one.passed) - len(one.differing) for one in compared),
        "traced_by_dflow": sum(one.traced for one in compared),
        "files": {one.file: one.as_json(exceptions) for one in compared},
        "stale_exceptions": exceptions.stale(compared),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
