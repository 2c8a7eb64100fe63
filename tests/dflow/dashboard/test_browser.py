"""Pages in a real browser: over the real server and a cluster that loses a worker, and a notebook's graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.testing import memory_cluster

pytestmark = pytest.mark.once

serving = pytest.importorskip("dflow.dashboard.serving", reason="needs pip install 'dflow[dashboard]'")


def has(place: Any, text: str) -> None:
    """Wait until the place shows the text."""
    place.filter(has_text=text).first.wait_for()


@pytest.mark.filterwarnings("ignore:train_step is traced and compiled again during a run:dflow.RetraceWarning")
def test_a_training_cluster_is_shown_from_its_first_step_to_a_death(new_page: Callable[..., Any]) -> None:
    ending = threading.Event()
    with memory_cluster(ps=1, workers=2) as memory:
        worker, other = memory.worker(), memory.worker(1)
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones((4, 4)), name="w")

        @dflow.jit
        def train_step(x: Any) -> Any:
            with jax.named_scope("dense"):
                hidden = jnp.tanh(x @ w)
            w.assign_sub(0.01 * hidden.T @ hidden)
            return {"loss": hidden.sum()}

        def batches() -> Iterator[Any]:
            yield (jnp.ones((2, 4)),)
            while not ending.wait(0.002):
                yield (jnp.ones((3, 4)),)

        def run() -> None:
            for _ in dflow.distributed.Async(worker).run(train_step, batches(), steps=10**6):
                pass

        thread = threading.Thread(target=run)
        thread.start()
        with closing(serving.DashboardServer(memory.network, memory.coordinator.address, every_s=0.1)) as server:
            try:
                _look_around(new_page(), server.address, other)
            finally:
                ending.set()
                thread.join()
        other.server.close()
        worker.close()


def _look_around(page: Any, address: str, other: dflow.distributed.Cluster) -> None:
    page.goto(address)
    has(page.locator(".steps"), "of 1,000,000")
    rows = page.locator("main tr")
    has(rows, "worker:0● live")
    page.goto(f"{address}#curves")
    has(page.locator(".plots h2"), "loss")
    page.goto(f"{address}#functions")
    page.locator("tr", has_text="train_step").first.click()  # both workers are in this process, with one function
    has(page.locator(".records"), "x: f32[2,4] -> f32[3,4]")
    page.goto(f"{address}#timeline")
    page.locator("button.primary:enabled").click()
    page.locator(".timeline canvas").wait_for()
    page.locator("nav a[href='#graph']").click()
    page.locator(".box", has_text="tanh").click()
    assert page.locator(".source code").inner_text() == "hidden = jnp.tanh(x @ w)"
    has(page.locator(".graph-legend"), "ps:0 · ")
    page.locator(".badge-text").first.wait_for()
    page.goto(f"{address}#overview")
    has(rows, "worker:1● live")
    other.coordinator.close("killed")
    has(rows, "worker:1○ left")
    has(page.locator(".events li"), "worker:1 left")
    has(page.locator(".figure"), "2 live")


def two_scopes() -> dflow.GraphView:
    w = dflow.Variable(jnp.ones((3, 3)), name="w")

    def two(x: Any) -> Any:
        with jax.named_scope("dense"):
            hidden = jnp.tanh(x @ w)
        with jax.named_scope("update"):
            w.assign_add(hidden.T @ hidden)
        return hidden.sum()

    return dflow.graph(two, jnp.ones((3, 3)))


def opened(page: Any, path: Path) -> Any:
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-shown-ms]")
    return page


def titles(place: Any) -> list[str]:
    return place.locator(".box .title, .group-open > .title").all_text_contents()


def test_groups_fold_and_a_click_shows_the_source_line(
    new_page: Callable[..., Any], picture: Callable[..., None], tmp_path: Path
) -> None:
    two_scopes().save(tmp_path / "graph.html")
    page = opened(new_page(), tmp_path / "graph.html")
    assert page.title() == "two"
    assert {"dense", "update", "tanh", "assign_add"} <= {*titles(page)}
    picture(page, "notebook-light")
    page.locator(".box", has_text="tanh").click()
    assert page.locator(".source code").inner_text() == "hidden = jnp.tanh(x @ w)"
    assert "test_browser.py:" in page.locator(".source").inner_text()
    page.locator(".group-open", has_text="dense").locator(".fold").click()
    page.locator(".box.scope", has_text="dense").wait_for()
    assert "tanh" not in titles(page)
    page.get_by_placeholder("Search").fill("tanh")
    page.get_by_text("1 match").wait_for()
    page.get_by_placeholder("Search").press("Enter")
    page.locator(".box.selected", has_text="tanh").wait_for()


def test_it_is_operated_by_keys(new_page: Callable[..., Any], tmp_path: Path) -> None:
    two_scopes().save(tmp_path / "graph.html")
    page = opened(new_page(color_scheme="dark"), tmp_path / "graph.html")
    page.locator(".graph-svg").focus()
    page.keyboard.press("ArrowDown")
    first = page.locator(".selected").first.get_attribute("data-id")
    page.keyboard.press("ArrowDown")
    assert page.locator(".selected").first.get_attribute("data-id") != first
    before = page.locator(".graph-svg > g").get_attribute("transform")
    page.keyboard.press("+")
    assert page.locator(".graph-svg > g").get_attribute("transform") != before
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"


def test_two_graphs_of_a_notebook_do_not_clash(new_page: Callable[..., Any], tmp_path: Path) -> None:
    outputs = [two_scopes()._repr_html_(), dflow.graph(jnp.cos, 1.0)._repr_html_()]
    (tmp_path / "notebook.html").write_text("<!doctype html><style>text{display:none}</style>" + "".join(outputs))
    page = new_page()
    page.goto((tmp_path / "notebook.html").as_uri())
    first, second = page.frame_locator("iframe").nth(0), page.frame_locator("iframe").nth(1)
    first.locator(".box", has_text="tanh").wait_for()
    second.locator(".box", has_text="cos").wait_for()
    first.locator(".box", has_text="tanh").click()
    assert second.locator(".selected").count() == 0
    page.locator("summary", has_text="picture").first.click()
    page.wait_for_function("document.images[0].naturalWidth > 100")


def test_a_graph_of_5000_nodes_opens_quickly(new_page: Callable[..., Any], tmp_path: Path) -> None:
    def deep(x: Any) -> Any:
        for layer in range(100):
            with jax.named_scope(f"layer_{layer}"):
                for _ in range(50):
                    x = jnp.sin(x)
        return x

    view = dflow.graph(deep, 1.0)
    assert len(view.graph.nodes) == 5000
    view.save(tmp_path / "deep.html")
    page = opened(new_page(), tmp_path / "deep.html")
    print("5,000 nodes shown after", page.evaluate("document.documentElement.dataset.shownMs"), "ms")
    assert 0 < page.locator(".box").count() <= 60
    assert "5,000 ops" in page.locator(".graph-panel").inner_text()


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: expected an ending .html or .svg, got '.*graph.png'"):
        two_scopes().save(tmp_path / "graph.png")
    two_scopes().save(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
