"""A headless Chromium for the tests of pages, and where they write pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Where pages are photographed into, for eyes; without it nothing is written.
PICTURES = os.environ.get("PICTURES", "")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: Without its services of the browser's maker, which would reach for the network.
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DEADLINE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium, or a skip that says what is missing.

    For one file, since Playwright runs an event loop in this thread until the end, where no test can run another one.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install 'dflow[integrations]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on PATH, such as by apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield launched
        launched.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Makes pages; at the end none has had an error in its script, or asked another host for anything."""
    opened: list[Any] = []
    faults: list[str] = []

    def make(**options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 800}, **options})
        page.set_default_timeout(DEADLINE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
        page.on("request", lambda request: faults.append(request.url) if is_elsewhere(request.url) else None)
        opened.append(page)
        return page

    yield make
    for page in opened:
        page.close()
    assert faults == []


def is_elsewhere(url: str) -> bool:
    """Whether a request leaves the machine."""
    return not url.startswith(("http://127.0.0.1", "file:", "data:", "blob:", "about:"))


@pytest.fixture
def picture() -> Callable[[Any, str], None]:
    """Writes a picture of a page into the folder that the environment variable PICTURES names."""

    def write(page: Any, name: str) -> None:
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))

    return write
