"""The built page in the package: it belongs to its sources, is small, and loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import dflow

pytestmark = pytest.mark.once
FOLDER = Path(dflow.__file__).parent / "dashboard"
WEB, STATIC = FOLDER / "web", FOLDER / "static"
REMEDY = "build it again by `make dashboard`, and commit dflow/dashboard/static"


def digest_of_sources(folder: Path) -> str:
    """As `web/build.mjs` computes it: of each path and its content, by path."""
    digest = hashlib.sha256()
    paths = [path for path in folder.rglob("*") if path.is_file() and "node_modules" not in path.parts]
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_built_files_belong_to_the_sources() -> None:
    built = json.loads((STATIC / "built.json").read_text())
    assert built["sources"] == digest_of_sources(WEB), f"dflow/dashboard/web has changed: {REMEDY}"
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in STATIC.iterdir()}
    del found["built.json"]
    assert found == built["files"], f"a built file was changed by hand: {REMEDY}"


def test_the_licences_of_all_bundled_packages_are_with_it() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())["packages"]
    bundled = {path.removeprefix("node_modules/") for path, about in lock.items() if path and not about.get("dev")}
    licences = (STATIC / "LICENSES.txt").read_text()
    assert bundled == {"uplot", "@dagrejs/dagre", "@dagrejs/graphlib"}
    for name in bundled:
        assert f"{name} {lock[f'node_modules/{name}']['version']}\n" in licences
    assert licences.count("Permission is hereby granted") == len(bundled)


def test_nothing_is_loaded_from_elsewhere() -> None:
    allowed = {"http://www.w3.org", "https://ui.perfetto.dev"}
    for path in STATIC.iterdir():
        if path.suffix != ".txt":
            found = set(re.findall(r"https?://[\w.]+", path.read_text()))
            assert found <= allowed, f"{path.name} names {found - allowed}"


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 400_000
    ours = [path for path in (WEB / "src").rglob("*") if path.is_file()]
    assert sum(path.read_text().count("\n") for path in ours) < 2700
    assert max(path.read_text().count("\n") for path in ours) < 500
