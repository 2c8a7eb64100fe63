// The page: header, tabs, and the live state that they share.
import { h, setText } from "./dom.js";
import { clock, number, rate, seconds } from "./format.js";
import { ask, Stream } from "./stream.js";
import { Overview } from "./overview.js";
import { Curves } from "./curves.js";
import { GraphTab } from "./graph_tab.js";
import { TimelineTab } from "./timeline_tab.js";
import { Functions } from "./functions.js";
import { Events } from "./events.js";

const PHASES = { connecting: "connecting", running: "running", unreachable: "not reachable", ended: "ended" };
/** While a tab that asks for its content when it is opened has none, it asks again after this time. */
const EMPTY_AGAIN_MS = 3000;

class Page {
  constructor() {
    this.runs = 0;
    this.tabs = {
      overview: new Overview(this), curves: new Curves(this), graph: new GraphTab(this),
      timeline: new TimelineTab(this), functions: new Functions(this), events: new Events(this),
    };
    this.build();
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.onkey(event));
    this.route();
    this.stream = new Stream("api/stream", {
      state: (state) => this.show(state),
      points: (points) => this.tabs.curves.add(points),
      news: ({ events }) => this.tabs.events.add(events),
      timeline: (timeline) => this.showTimeline(timeline),
    }, (lost, text) => this.showLost(lost, text));
    this.refetch();
  }

  build() {
    this.links = Object.fromEntries(Object.entries(this.tabs).map(([name, tab], index) =>
      [name, h("a", { href: `#${name}`, title: `Key ${index + 1}`, "aria-keyshortcuts": index + 1 }, tab.title)]));
    this.phase = h("span", { class: "pill", "data-level": "off" }, "connecting");
    this.address = h("span", { class: "faint address" });
    this.progress = h("progress", { max: 1, value: 0, "aria-label": "Steps done" });
    this.steps = h("span", { class: "steps" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true });
    this.main = h("main", { tabindex: "-1" });
    document.body.append(
      h("a", { class: "skip", href: "#overview", onclick: (event) => { event.preventDefault(); this.main.focus(); } }, "Skip to content"),
      h("header", {},
        h("div", { class: "top" }, h("span", { class: "brand" }, "dflow"), this.phase, this.address, h("span", { class: "spring" }), this.steps, this.progress),
        h("nav", { "aria-label": "Views" }, ...Object.values(this.links))),
      this.banner, this.main);
  }

  /** #graph?task=worker:0&id=3 opens a tab with parameters. */
  route() {
    const [name, query] = location.hash.slice(1).split("?");
    const shown = this.tabs[name] ? name : "overview";
    for (const [tab, link] of Object.entries(this.links)) {
      if (tab === shown) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (this.shown !== shown) {
      this.shown = shown;
      this.main.className = `tab-${shown}`;
      this.main.replaceChildren(this.tabs[shown].element);
      document.title = `${this.tabs[shown].title} · dflow`;
    }
    this.opened = Date.now();
    this.tabs[shown].open?.(new URLSearchParams(query ?? ""));
  }

  onkey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const name = Object.keys(this.tabs)[Number(event.key) - 1];
    if (name) location.hash = name;
  }

  isShown(tab) {
    return this.tabs[this.shown] === tab;
  }

  async refetch() {
    for (const tab of Object.values(this.tabs)) tab.refetch?.();
    ask("api/timeline").then((timeline) => this.showTimeline(timeline)).catch(() => {});
  }

  /** Another run has begun at this address: nothing of the earlier one stays. */
  restart() {
    this.runs++;
    for (const tab of Object.values(this.tabs)) tab.restart?.();
    this.refetch();
    this.route();
  }

  show(state) {
    const isAnother = this.state?.run && state.run && state.run !== this.state.run;
    this.state = { ...state, run: state.run || this.state?.run };
    if (isAnother) this.restart();
    const level = { running: "ok", connecting: "warn", unreachable: "bad", ended: "off" }[state.phase];
    this.phase.dataset.level = level;
    setText(this.phase, PHASES[state.phase]);
    setText(this.address, [state.coordinator, state.at_s === null ? "" : `up ${clock(state.at_s)}`].filter(Boolean).join(" · "));
    const { done, total, per_s } = state.steps;
    const left = total && per_s ? `, ${seconds((total - done) / per_s)} left` : "";
    setText(this.steps, total ? `step ${number(done)} of ${number(total)} · ${rate(per_s)}/s${state.phase === "running" && done < total ? left : ""}` : "");
    this.progress.hidden = !total;
    this.progress.value = total ? done / total : 0;
    this.showBanner();
    for (const tab of Object.values(this.tabs)) tab.update?.(state);
    if (this.tabs[this.shown].isEmpty && Date.now() - this.opened > EMPTY_AGAIN_MS) this.route();
  }

  showLost(lost, text) {
    this.lost = lost ? text || "Trying again …" : null;
    document.body.classList.toggle("stale", lost);
    if (lost) {
      this.phase.dataset.level = "bad";
      setText(this.phase, "not connected");
    }
    this.showBanner();
    if (!lost) this.refetch();
  }

  showBanner() {
    let [text, level] = ["", "bad"];
    if (this.lost) text = `Connection lost. ${this.lost}${this.state ? "\nWhat is shown is from before." : ""}`;
    else if (this.state?.phase === "unreachable") text = this.state.phase_text;
    else if (this.state?.phase === "ended") [text, level] = [this.state.phase_text || "The cluster has ended. This is its last state.", "off"];
    this.banner.hidden = !text;
    this.banner.dataset.level = level;
    setText(this.banner, text);
  }

  showTimeline(timeline) {
    this.timeline = timeline;
    this.tabs.timeline.showTimeline(timeline);
    this.tabs.graph.measure(timeline.items ?? []);
  }
}

new Page();
