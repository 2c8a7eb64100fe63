"""What a release promises: versions, licence, changelog, formats, and types that a user's checker sees."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import dflow
from dflow.cli.local.doctor_checks import OF_DEVELOPERS
from dflow.distributed.coordinator import coordinator_store
from dflow.distributed.wire.messages.basic import PROTOCOL_VERSION
from dflow.exporting import export_format
from dflow.lowering.files import array_manifest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_of_promises_has_the_numbers_of_the_formats_and_the_protocol() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    said = [re.findall(rf"\| {what}: (?:format|version) (\d+)", page) for what in FORMATS]
    assert said == [[str(number)] for number in FORMATS.values()]


FORMATS = {
    "checkpoints, and the parts of snapshots": array_manifest.VERSION,
    "exports": export_format.FORMAT,
    "the state file of the coordinator": coordinator_store.FORMAT,
    "the protocol between tasks": PROTOCOL_VERSION,
}


def test_the_changelog_has_this_version_after_what_is_not_released() -> None:
    titles = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == ("Unreleased", "")
    assert titles[1][0] == dflow.__version__
    assert all(
        re.fullmatch(r"\d+\.\d+\.\d+", version) and re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        for version, date in titles[1:]
    )


def test_the_supported_version_is_this_one() -> None:
    major, minor, _ = dflow.__version__.split(".")
    assert f"the newest minor version, {major}.{minor} now" in (ROOT / "SECURITY.md").read_text()


def test_the_page_on_installation_lists_each_extra_for_users() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert set(listed) == set(PROJECT["optional-dependencies"]) - OF_DEVELOPERS


def test_the_licence_is_stated_and_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "LICENSE" in PROJECT["license-files"]


def test_packages_in_the_dashboards_bundle_come_with_their_licence() -> None:
    web, built = ROOT / "dflow" / "dashboard" / "web", ROOT / "dflow" / "dashboard" / "static"
    lock = json.loads((web / "package-lock.json").read_text())["packages"]
    bundled = {
        f"{path.removeprefix('node_modules/')} {package['version']}"
        for path, package in lock.items()
        if path and not package.get("dev") and not package.get("optional")
    }
    assert len(bundled) >= 2
    assert bundled <= set((built / "LICENSES.txt").read_text().splitlines())
    assert "dflow/dashboard/static/LICENSES.txt" in PROJECT["license-files"]
