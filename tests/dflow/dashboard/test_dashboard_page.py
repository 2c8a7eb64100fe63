"""The dashboard's built page: in a real browser with answers from samples, and as files of the package."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dflow
from tests.dflow.dashboard import fake_server as samples
from tests.dflow.dashboard.fake_server import FakeServer

pytestmark = pytest.mark.once
NewPage = Callable[..., Any]
Picture = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    return samples.graph()


@pytest.fixture
def server(graph: dict[str, Any]) -> Iterator[FakeServer]:
    line = next(line["at"] for line in graph["lines"] if "tanh" in line["text"])
    made = FakeServer(
        {
            "api/state": samples.state(),
            "api/history": samples.history(),
            "api/events": {"events": samples.events(), "newest": 5, "lost": 0},
            "api/functions": samples.functions(),
            "api/traces": samples.traces(),
            "api/graph": {"task": "worker:0", "id": 3, "trace": 2, "name": "train_step", "graph": graph},
            "api/timeline": samples.timeline(line),
            "api/timeline/trace.json": samples.trace(),
        }
    )
    yield made
    made.close()


def opened(page: Any, server: FakeServer, tab: str = "overview") -> Any:
    page.goto(f"{server.url}#{tab}")
    page.locator("header nav a[aria-current]").wait_for()
    return page


def row(page: Any, task: str) -> Any:
    return page.locator("main tr", has=page.get_by_text(task, exact=True))


def has(place: Any, text: str) -> None:
    """Wait until the place shows the text."""
    place.filter(has_text=text).first.wait_for()


def test_a_killed_worker_and_its_return_are_shown_without_reloading(
    new_page: NewPage, server: FakeServer, picture: Picture
) -> None:
    page = opened(new_page(), server)
    has(row(page, "worker:1"), "● live")
    has(row(page, "worker:2"), "▲ straggler, 2.1 x the median")
    has(page.locator(".figure"), "1 needs attention, 1 restart")
    has(page.locator(".figure"), "576 B written of 832 B")
    has(row(page, "ps:0"), "examples 3/10")
    has(page.locator("main tr"), "6.7 MB/s")
    has(page.locator(".figure"), "600.0 kB/s")
    picture(page, "overview-light")
    loads = page.evaluate("performance.timeOrigin")
    page.get_by_label("Show tasks").focus()

    killed = samples.state(at_s=36.2)
    killed["tasks"][3] |= {"state": "left", "level": "bad", "text": "left: killed", "steps_per_s": None}
    server.push("state", killed)
    server.push("news", {"events": [samples.event(6, 36.0, "left", "worker:1 has left: killed", "worker:1")]})
    has(row(page, "worker:1"), "■ left: killed")
    has(page.locator(".events li").first, "worker:1 has left: killed")
    server.push("news", {"events": [samples.event(7, 36.1, "finished", "worker:0 has finished", "worker:0")]})
    finished = page.locator(".events li", has_text="worker:0 has finished")
    has(finished, "○ finished")
    page.get_by_label("Show tasks").select_option("trouble")
    assert page.locator("main tr", has_text="worker:0").count() == 0

    server.push(
        "state",
        samples.state(
            at_s=38.2,
            not_finite=[{"run": "train_step", "metric": "loss", "value": "nan", "step": 12, "task": "worker:1"}],
        ),
    )
    page.get_by_label("Show tasks").select_option("all")
    has(row(page, "worker:1"), "● live")
    has(page.locator(".banner"), "loss was nan at step 12 of train_step on worker:1.")
    page.get_by_role("button", name="Steps/s").click()
    assert page.locator("main tbody").first.locator("tr").last.inner_text().startswith("ps:")
    assert page.evaluate("performance.timeOrigin") == loads


def test_a_lost_connection_is_told_and_found_again(new_page: NewPage, server: FakeServer) -> None:
    page = opened(new_page(color_scheme="dark"), server)
    has(row(page, "worker:0"), "live")
    server.push("state", samples.state(phase="unreachable", phase_text="the coordinator does not answer for 12 s"))
    has(page.get_by_role("alert"), "the coordinator does not answer for 12 s")
    has(page.locator(".pill"), "not reachable")
    server.close()
    has(page.get_by_role("alert"), "Connection lost. The dashboard's server does not answer.")
    assert page.locator(".stale .pill").inner_text() == "not connected"
    again = FakeServer(server.answers | {"api/state": samples.state(at_s=60.0)}, server.port)
    try:
        page.get_by_role("alert").wait_for(state="hidden")
        has(page.locator(".address"), "up 1:00")
        assert page.locator("body.stale").count() == 0
        again.push("state", samples.state(phase="ended", phase_text=""))
        has(page.get_by_role("alert"), "The cluster has ended. This is its last state.")
        again.refusal = {"status": 503, "text": "50 pages are open", "remedy": "close some"}
        has(opened(new_page(), again).get_by_role("alert"), "50 pages are open\nclose some")
    finally:
        again.close()


def test_curves_have_a_plot_for_each_metric_and_one_cursor(
    new_page: NewPage, server: FakeServer, picture: Picture
) -> None:
    page = opened(new_page(color_scheme="dark"), server, "curves")
    page.locator(".plot canvas").first.wait_for()
    names = page.locator(".plots h2").all_inner_texts()
    assert [name.split("\n")[0] for name in names] == [
        "loss",
        "steps/s",
        "steps/s of the cluster",
        "processor",
        "bytes/s",
    ]
    page.locator(".u-over").first.hover(position={"x": 100, "y": 60})
    has(page.locator(".tip"), "worker:2")
    assert page.locator(".tip:visible").count() == len(names)
    picture(page, "curves-dark")
    server.push("points", {"at_s": 31.0, "step": 350, "values": {"worker:0/loss": 7.125}})
    has(page.locator(".newest"), "7.125")
    loss = page.locator(".u-over").first
    loss.hover(position={"x": 100, "y": 60})
    page.mouse.down()
    loss.hover(position={"x": 200, "y": 60})
    page.mouse.up()
    server.push("points", {"at_s": 32.0, "step": 355, "values": {"worker:0/loss": 8.5}})
    has(page.locator(".newest"), "8.5")
    loss.hover(position={"x": 300, "y": 60})
    has(page.locator(".tip b"), "0:1")  # still zoomed in: at this place would be the half minute
    page.get_by_role("button", name="worker:0").click()
    page.locator(".newest", has_text="8.5").wait_for(state="detached")
    page.get_by_placeholder("Filter").fill("bytes")
    assert page.locator(".plots section").count() == 1


def test_another_run_at_the_same_address_replaces_all_of_the_earlier_one(new_page: NewPage, server: FakeServer) -> None:
    server.answers["api/state"] = samples.state(run="first")
    page = opened(new_page(), server, "timeline")
    page.locator(".timeline canvas").wait_for()
    page.keyboard.press("6")
    has(page.locator("main .events li"), "snapshot 4")
    page.keyboard.press("2")
    page.locator(".plot canvas").first.wait_for()
    server.push("points", {"at_s": 31.0, "step": 350, "values": {"worker:0/loss": 7.125}})
    has(page.locator(".newest"), "7.125")

    server.answers["api/history"] = {
        "series": [samples.series("worker:0", "loss", "", lambda at: 5.5, 2)],
        "left_out": 0,
    }
    server.answers["api/events"] = {
        "events": [samples.event(1, 0.5, "joined", "ps:0 joined again", "ps:0")],
        "newest": 1,
        "lost": 0,
    }
    server.answers["api/functions"] = {"tasks": [], "missing": {"worker:0": "is new"}}
    server.answers["api/timeline"] = {"state": "none", "text": "", "number": 0, "took": [], "messages": [], "items": []}
    server.push("state", samples.state(at_s=1.0, run="second"))
    has(page.locator(".newest"), "5.5")
    assert page.locator(".plots section").count() == 1
    server.push("points", {"at_s": 2.0, "step": 20, "values": {"worker:0/loss": 6.25}})
    has(page.locator(".newest"), "6.25")
    page.keyboard.press("6")
    has(page.locator("main .events li"), "ps:0 joined again")
    assert page.locator("main .events li").count() == 1
    page.keyboard.press("4")
    has(page.locator("main .empty"), "Trace a few steps")
    page.keyboard.press("5")
    has(page.locator(".card"), "worker:0: is new.")
    server.push("state", samples.state(at_s=3.0, run="third"))
    server.answers["api/functions"] = samples.functions()
    server.push("state", samples.state(at_s=1.0, run="fourth"))
    has(page.locator("main tr"), "train_step")


def test_a_graph_shows_devices_sizes_and_measured_times(
    new_page: NewPage, server: FakeServer, picture: Picture
) -> None:
    page, late = new_page(), {}
    page.route("**/api/timeline", lambda route: late.update(times=route))
    opened(page, server, "graph?task=worker:0&id=3")
    function = page.locator(".box.function").first
    function.wait_for()
    has(page.locator(".graph-legend"), "ps:1 · ")
    has(page.locator(".edge text"), "2.6 kB")
    late["times"].continue_()  # the boxes are drawn before their times are known
    has(function, "2.1 ms")
    # Opened, and clicked before it is laid out again.
    function.evaluate(
        "(box) => [box.querySelector('.fold'), box].map((at) => at.dispatchEvent(new Event('click', {bubbles: true})))"
    )
    page.locator(".box.op", has_text="tanh").first.click()
    assert page.locator(".source code").inner_text() == "return jnp.tanh(x) * 2"
    has(page.locator(".graph-panel"), "2.1 ms Call: %10 (xla.call)")
    has(page.locator(".graph-panel"), "1.0 ms Recv: dense/kernel")
    page.get_by_label("Colour boxes by").select_option("time")
    has(page.locator(".graph-legend"), "Darker boxes took more of a step")
    page.locator(".graph-panel .crumbs button").first.click()
    has(page.locator(".graph-panel h3"), "dense")
    picture(page, "graph-light")
    page.evaluate("location.hash = 'graph?task=worker:0&id=3&trace=2'")  # drawn when the times are known
    has(function, "2.1 ms")


@pytest.mark.parametrize(
    ("tab", "path", "shown"), [("graph", "graph", ".graph-panel h3"), ("functions", "traces", "h2")]
)
def test_a_late_answer_does_not_replace_a_newer_choice(
    new_page: NewPage, server: FakeServer, tab: str, path: str, shown: str
) -> None:
    page, late = new_page(), []

    def answer(route: Any) -> None:
        if "id=4" in route.request.url:
            late.append(route)
        else:
            route.continue_()

    page.route(f"**/api/{path}?*", answer)
    opened(page, server, f"{tab}?task=worker:0&id=4")
    page.wait_for_function(
        "() => performance.getEntriesByType('resource').some(({ name }) => name.endsWith('functions'))"
    )
    with page.expect_request(f"**/api/{path}?*id=3"):
        page.evaluate(f"location.hash = '{tab}?task=worker:0&id=3'")
    has(page.locator(shown), "train_step")
    earlier = server.answers[f"api/{path}"] | {"id": 4, "name": "earlier"}
    if "graph" in earlier:
        earlier["graph"] = earlier["graph"] | {"title": "earlier"}
    with page.expect_response(f"**/api/{path}?*id=4"):
        late[0].fulfill(json=earlier)
    page.evaluate("fetch('api/state').then((answer) => answer.json())")  # the page has the late answer before this one
    page.locator("main [aria-busy]").first.wait_for(state="detached")
    assert page.locator(shown, has_text="earlier").count() == 0
    has(page.locator(shown), "train_step")


def test_a_timeline_is_traced_drawn_and_given_to_perfetto(
    new_page: NewPage, server: FakeServer, picture: Picture
) -> None:
    none = {"state": "none", "text": "", "number": 0, "steps": 5, "took": [], "messages": [], "items": []}
    timeline, server.answers["api/timeline"] = server.answers["api/timeline"], none
    server.answers["POST api/timeline"] = none | {"state": "running"}
    page = opened(new_page(color_scheme="dark"), server, "timeline")
    has(page.locator(".empty"), "Trace a few steps")
    page.locator("button.primary:enabled").wait_for()
    page.get_by_label("Steps of each worker").fill("7")
    page.get_by_role("button", name="Trace").click()
    has(page.locator(".tools"), "Waiting for 5 steps of each worker")
    assert server.posted == [{"steps": 7, "timeout_s": 60}]
    server.push("timeline", timeline)
    canvas = page.locator(".timeline canvas")
    canvas.wait_for()
    has(page.locator("main tr"), "4.4 ms")
    picture(page, "timeline-dark")
    canvas.focus()
    page.keyboard.press("n")
    has(page.locator(".timeline-details"), "step 0 of worker:0")
    has(page.locator(".timeline-details"), "digits.py:14")

    page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    with page.expect_popup() as popup:
        page.get_by_role("button", name="Open in Perfetto").click()
    has(page.locator(".tools"), "Sent to Perfetto")
    popup.value.locator("#trace").wait_for()
    assert json.loads(popup.value.locator("#trace").inner_text()) == samples.trace()
    popup.value.close()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert json.loads(download.value.path().read_text()) == samples.trace()


#: Takes a trace as Perfetto does.
PERFETTO = """<script>onmessage = ({data, source}) => {
  if (data === "PING") source.postMessage("PONG", "*");
  if (!data.perfetto) return;
  const text = new TextDecoder().decode(data.perfetto.buffer);
  document.body.insertAdjacentHTML("beforeend", `<pre id=trace>${text}</pre>`);
};</script><body>"""


def test_the_causes_of_traces_and_the_events_are_listed(new_page: NewPage, server: FakeServer) -> None:
    page = opened(new_page(), server, "functions")
    has(page.locator(".card"), "worker:1: did not answer within 2 s.")
    row(page, "train_step").focus()
    page.keyboard.press("Enter")
    has(page.locator(".records li").first, "x: f32[8,64] -> f32[5,64]")
    page.locator(".records a").first.click()
    page.locator(".box").first.wait_for()
    page.keyboard.press("6")
    page.locator("main .events time").first.wait_for()
    page.get_by_label("Kinds of events").select_option("snapshot")
    assert page.locator("main .events li").all_inner_texts() == ["0:20\n● snapshot\nsnapshot 4: 576 B written of 832 B"]


def test_without_anything_to_show_each_view_says_what_to_do(new_page: NewPage) -> None:
    empty = samples.state(at_s=None, phase="connecting", tasks=[], phase_text="127.0.0.1:7711 does not answer yet")
    server = FakeServer(
        {
            "api/state": empty,
            "api/history": {"series": [], "left_out": 0},
            "api/functions": {"tasks": [], "missing": {}},
        }
    )
    try:
        page = opened(new_page(viewport={"width": 390, "height": 800}), server)
        has(page.locator(".empty"), "127.0.0.1:7711 does not answer yet")
        for tab, text in {
            "curves": "appear after the first steps",
            "graph": "when a task has called it",
            "timeline": "Trace a few steps",
            "functions": "Functions under dflow.jit appear here",
            "events": "no answer for api/events\nprepare one",
        }.items():
            page.goto(f"{server.url}#{tab}")
            has(page.locator("main"), text)
    finally:
        server.close()


def test_curves_ask_again_after_a_history_that_failed(new_page: NewPage, server: FakeServer) -> None:
    history = server.answers.pop("api/history")
    page = new_page()
    with page.expect_response("**/api/history"):
        opened(page, server, "curves")
    has(page.locator(".pill"), "running")
    point = {"at_s": 31.0, "step": 350, "values": {"worker:0/loss": 7.125}}
    with page.expect_response("**/api/history"):
        server.push("points", point)
    server.answers["api/history"] = history
    with page.expect_response("**/api/history", timeout=3000):
        page.evaluate(
            "fetch('api/state').then((answer) => answer.json())"
        )  # the failure has arrived before this answer
        server.push("points", point)
    page.locator(".plot canvas").first.wait_for()


def test_every_view_fits_a_phone(new_page: NewPage, server: FakeServer, picture: Picture) -> None:
    page = opened(new_page(viewport={"width": 390, "height": 800}), server)
    shown = {
        "overview": ".figure",
        "curves": ".plot canvas",
        "graph": ".box",
        "timeline": ".timeline canvas",
        "functions": "tbody tr",
        "events": "time",
    }
    for tab, part in shown.items():
        page.goto(f"{server.url}#{tab}")
        page.locator(f"main {part}").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
        picture(page, f"phone-{tab}")


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
