"""python -m tests.jax_suite FOLDER [FILE ...] [options] [-- pytest arguments]

Runs each test file below FOLDER twice, in separate processes: with `jax.jit`, and with `dflow.jit` instead. Prints a
table, and each test that passes only with `jax.jit`. Exits with 1 when one of those is not listed in exceptions.toml,
and with 2 when nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.jax_suite.compare import Exceptions, FileComparison, differences, table
from tests.jax_suite.jax_files import DEFAULT
from tests.jax_suite.process import FileRun, Limits, run_file


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments for pytest."""
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m tests.jax_suite", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="where the test files are: the tests of a checkout of JAX, or others'"
    )
    parser.add_argument("files", nargs="*", help="paths below it; without any, those of JAX's that are about jit")
    parser.add_argument("--suite", default="jax", help="the table of exceptions.toml that holds for these files")
    parser.add_argument("--exceptions", type=Path, default=Path(__file__).with_name("exceptions.toml"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="files at a time")
    parser.add_argument("--test-timeout", type=float, default=Limits.test, metavar="SECONDS")
    parser.add_argument("--file-timeout", type=float, default=Limits.file, metavar="SECONDS")
    parser.add_argument(
        "--version-of", action="append", default=[], metavar="PACKAGE", help="note its version in the JSON; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_intermixed_args(argv[:at]), list(argv[at + 1 :])


def main(argv: Sequence[str]) -> int:
    options, for_pytest = parsed(argv)
    root: Path = options.folder.resolve()
    exceptions = Exceptions.of(options.exceptions, options.suite)
    files, absent = chosen(root, options.files)
    if not files:
        print(f"no test file of {len(absent)} is in {root}; say a folder that holds them")
        return 2
    if absent:
        print(f"not in {root}, which is of another version: {', '.join(absent)}")
    compared: list[FileComparison] = []
    for one in each(files, root, Limits(options.test_timeout, options.file_timeout), for_pytest, options.jobs):
        compared = sorted([*compared, one], key=lambda one: files.index(one.file))
        print(
            f"[{len(compared)}/{len(files)}] {one.file}: {len(one.passed)} with jax.jit, {len(one.differing)} of them "
            "not with dflow.jit",
            flush=True,
        )
        if options.json:  # after each file, since a whole suite takes long
            options.json.write_text(json.dumps(report(options, for_pytest, compared, exceptions), indent=2) + "\n")
    print("\n" + table(compared, exceptions))
    for text in (differences(compared, exceptions), troubles(compared)):
        if text:
            print("\n" + text)
    for pattern in exceptions.stale(compared, selected=bool(for_pytest)):
        print(f"stale exception, no test differs by it any more: {pattern}")
    if not any(one.passed for one in compared):
        print("nothing was compared: no test passes with jax.jit")
        return 2
    return int(any(one.unlisted(exceptions) for one in compared))


def each(
    files: Sequence[str], root: Path, limits: Limits, for_pytest: Sequence[str], jobs: int
) -> Iterator[FileComparison]:
    """Run at most `jobs` files concurrently, each in both ways, and yield each when it has ended."""
    stop = threading.Event()

    def one(file: str) -> FileComparison:
        runs = (run_file(file, way, root, limits, for_pytest, stop=stop) for way in ("jax", "dflow"))
        return FileComparison(file, *runs)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for ended in as_completed([pool.submit(one, file) for file in files]):
                yield ended.result()
        except BaseException:  # an interrupt from the keyboard leaves no process behind
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def chosen(root: Path, files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the requested files, and the default files that are missing. Raises SystemExit for other missing ones."""
    if not files:
        here = [file for file in DEFAULT if (root / file).is_file()]
        return here, [file for file in DEFAULT if file not in here]
    return list(dict.fromkeys(one.relative_to(root).as_posix() for file in files for one in inside(root, file))), []


def inside(root: Path, file: str) -> list[Path]:
    """Return the test files of a folder below `root`, or the files of that name in any folder. Raises SystemExit."""
    path = root / file
    if path.is_dir():
        return sorted({*path.rglob("*_test.py"), *path.rglob("test_*.py")})
    found = [path] if path.is_file() else sorted(root.rglob(path.name)) if path.parent == root else []
    if not found:
        raise SystemExit(f"{path} does not exist; name files and folders below {root}")
    return found


def troubles(compared: Sequence[FileComparison]) -> str:
    """Return the reasons why a file did not run completely, for each way, with the package to install."""
    lines = []
    for one in compared:
        for way, run in (("jax.jit", one.plain), ("dflow.jit", one.replaced)):
            if run.trouble:
                lines.append(f"{one.file} with {way}: {run.trouble}{remedy(run)}")
    return "\n".join(lines)


def remedy(run: FileRun) -> str:
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
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", *options.version_of)}
    return {
        "suite": options.suite,
        "versions": {"python": platform.python_version(), **versions},
        "pytest_arguments": list(for_pytest),
        "passed_with_jax": sum(len(one.passed) for one in compared),
        "passed_with_dflow": sum(len(one.passed) - len(one.differing) for one in compared),
        "traced_by_dflow": sum(one.traced for one in compared),
        "files": {one.file: one.as_json(exceptions) for one in compared},
        "stale_exceptions": exceptions.stale(compared, selected=bool(for_pytest)),
    }


if __name__ == "__main__":
    # Like an interrupt: end the processes of the tests too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
