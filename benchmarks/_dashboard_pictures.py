"""Take the pictures of the dashboard and of a notebook's graph for docs/, from a real cluster in a real browser.

    python -m benchmarks._dashboard_pictures docs/images

Launches `examples/digits.py` with two parameter tasks and three workers, kills a worker, and traces two steps. Needs
Chromium, and the extras `dashboard` and `integrations`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from playwright.sync_api import Page, sync_playwright

import dflow

OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
LAUNCH = ["--dashboard", "--ps", "2", "--workers", "3", "--restart", "worker=on-failure", "--snapshot-every", "4"]
SIZE = {"width": 1200, "height": 760}
DEADLINE_MS = 120_000


@contextlib.contextmanager
def launched(snapshots: str) -> Iterator[tuple[str, int]]:
    """Launch the example; yield the dashboard's address and the id of the launcher."""
    script = ["examples/digits.py", "--steps", "60000"]
    command = [sys.executable, "-m", "dflow", "launch", *LAUNCH, "--snapshots", snapshots, *script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"dashboard: (http\S+)", line):
                    yield found[1], process.pid
                    break
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def worker_of(launcher: int) -> int:
    """Process id of worker 1."""
    listed = subprocess.run(["ps", "--ppid", str(launcher), "-o", "pid="], capture_output=True, text=True, check=True)
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_text()
            if "DFLOW_JOB=worker" in environment and "DFLOW_INDEX=1\0" in environment:
                return pid
    raise SystemExit("worker:1 is not there")


def attention(width: int = 64) -> dflow.GraphView:
    """A training step of two layers of attention."""
    names = [f"layer_{layer}/{part}" for layer in range(2) for part in ("qkv", "out", "mlp")]
    weights = {name: dflow.Variable(jnp.ones((width, width)), name=name) for name in names}

    @jax.jit
    def normalized(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)

    def train_step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            hidden = x
            for layer in range(2):
                with jax.named_scope(f"layer_{layer}"):
                    with jax.named_scope("attention"):
                        keys = normalized(hidden) @ weights[f"layer_{layer}/qkv"]
                        hidden = hidden + jax.nn.softmax(keys @ keys.T) @ hidden @ weights[f"layer_{layer}/out"]
                    with jax.named_scope("mlp"):
                        hidden = hidden + jax.nn.gelu(normalized(hidden) @ weights[f"layer_{layer}/mlp"])
            with jax.named_scope("loss"):
                return ((hidden - y) ** 2).mean()

        value, gradients = dflow.value_and_grad(loss, list(weights.values()))()
        with jax.named_scope("update"):
            for variable, gradient in zip(weights.values(), gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
        return value

    batch = jax.ShapeDtypeStruct((8, width), jnp.float32)
    return dflow.graph(train_step, batch, batch)


def shot(page: Page, path: Path) -> None:
    """Write the picture of a page, of 256 colours if Pillow is installed."""
    page.screenshot(path=str(path))
    with contextlib.suppress(ImportError):
        from PIL import Image

        pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
        colours, places, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
        palette = frequent(colours[np.argsort(-counts)])
        nearest = np.array([((palette - colour) ** 2).sum(axis=1).argmin() for colour in colours], np.uint8)
        image = Image.fromarray(nearest[places.ravel()].reshape(pixels.shape[:2]))
        image.putpalette(palette.astype(np.uint8).ravel().tolist())
        image.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def frequent(colours: np.ndarray[Any, Any], count: int = 256, apart: int = 6) -> np.ndarray[Any, Any]:
    """Return the first colours, leaving out those too near an earlier one."""
    found = colours[:1]
    for colour in colours[1:]:
        if len(found) < count and (np.abs(found - colour).max(axis=1) > apart).all():
            found = np.vstack([found, colour])
    return found


def cluster_pictures(page: Page, address: str, launcher: int, folder: Path) -> None:
    """Take the pictures of a running cluster."""
    page.goto(address)
    page.locator(".steps", has_text="of 60,000").wait_for(timeout=DEADLINE_MS)
    page.locator(".figure", has_text="number 2").wait_for(timeout=DEADLINE_MS)
    os.kill(worker_of(launcher), signal.SIGKILL)
    again = page.locator("tr[data-key^='worker:1 ']")
    page.locator(".events li", has_text="worker:1 joined again").wait_for(timeout=DEADLINE_MS)
    again.filter(has_text=re.compile(r"live[^0-9]*[2-9]\d")).wait_for(timeout=DEADLINE_MS)
    page.locator("tr", has_text="conv1/kernel+2").filter(has_text="MB/s").first.wait_for(timeout=DEADLINE_MS)
    shot(page, folder / "dashboard-overview.png")
    page.emulate_media(color_scheme="dark")
    page.goto(f"{address}#curves")
    page.locator(".u-over").first.hover(position={"x": 250, "y": 60})
    shot(page, folder / "dashboard-curves.png")
    page.goto(f"{address}#timeline")
    page.get_by_label("Steps of each worker").fill("2")
    page.locator("button.primary:enabled").click()
    canvas = page.locator(".timeline canvas")
    canvas.wait_for(timeout=DEADLINE_MS)
    page.get_by_role("button", name="Zoom in").click()
    page.mouse.move(5, 5)
    shot(page, folder / "dashboard-timeline.png")
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}#graph")
    page.locator(".box", has_text="updates").wait_for(timeout=DEADLINE_MS)
    shot(page, folder / "dashboard-graph.png")


def main() -> None:
    """Write the pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as temporary:
        browser = driver.chromium.launch(executable_path=chromium, args=OPTIONS)
        graph = Path(temporary) / "graph.html"
        attention().save(graph)
        page = browser.new_page(viewport={"width": 1200, "height": 640})
        page.goto(graph.as_uri())
        page.locator(".box", has_text="attention").first.wait_for()
        shot(page, folder / "graph-notebook.png")
        page.close()
        with launched(str(Path(temporary) / "snapshots")) as (address, launcher):
            page = browser.new_page(viewport=SIZE)
            cluster_pictures(page, address, launcher, folder)
        browser.close()


if __name__ == "__main__":
    main()
