"""TensorBoard's own pages in a browser: curves and the graph of a step are drawn.

With `DFLOW_SCREENSHOTS=folder` the pages are kept as PNG files. Skipped without TensorBoard, Playwright or Chromium.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import jax.numpy as jnp
import pytest

import dflow
from dflow.loggers import TensorBoard
from tests.distributed.waiting import DEADLINE_S, until

pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [pytest.mark.once, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of TensorBoard with one run."""
    w = dflow.Variable(jnp.ones(3), name="layer/w")
    with TensorBoard(tmp_path / "run") as board:
        board.graph(dflow.graph(lambda x: w.assign_add(w * x), jnp.ones(3)))
        for step in range(5):
            board.log(step, {"loss": 1 / (1 + step)})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL) as running:
        try:
            until(lambda: b'"loss"' in answer(f"http://127.0.0.1:{port}/data/plugin/scalars/tags"))
            yield f"http://127.0.0.1:{port}"
        finally:
            running.kill()


def answer(address: str) -> bytes:
    """What the server answers; nothing before it does."""
    try:
        with urlopen(address, timeout=DEADLINE_S) as response:
            return bytes(response.read())
    except URLError:
        return b""


def test_the_pages_of_curves_and_of_the_graph(server: str) -> None:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(1000 * DEADLINE_S)
        page.goto(f"{server}/#scalars")
        page.locator("text=tag: loss").wait_for()
        page.locator("vz-line-chart2 g.plot path, vz-line-chart2 path.line").first.wait_for(state="attached")
        keep(page, "scalars")
        page.goto(f"{server}/#graphs")
        page.locator("g.node text", has_text="assign_add").first.wait_for()
        assert page.locator("g.node text", has_text="layer").count() >= 1
        assert page.locator("g.edge path").count() >= 3
        keep(page, "graphs")
        browser.close()


def keep(page: Any, name: str) -> None:
    """Keep the page as a picture if there is a folder for it."""
    if folder := os.environ.get("DFLOW_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")
