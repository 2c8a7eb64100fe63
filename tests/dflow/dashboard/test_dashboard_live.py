"""The page in a real browser, over the real server and a cluster that trains and loses a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.testing import memory_cluster

serving = pytest.importorskip("dflow.dashboard.serving", reason="needs pip install 'dflow[dashboard]'")
pytestmark = pytest.mark.once


def has(place: Any, text: str) -> None:
    """Wait until the place shows the text."""
    place.filter(has_text=text).first.wait_for()


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
