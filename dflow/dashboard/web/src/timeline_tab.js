// Steps of all tasks on one time axis: started from here, drawn here, and handed to Perfetto.
import { emptyState, h, Table } from "./dom.js";
import { bytes, microseconds } from "./format.js";
import { ask } from "./stream.js";
import { Timeline } from "./timeline.js";

const PERFETTO = "https://ui.perfetto.dev";
const PERFETTO_WAIT_MS = 15_000;
const FILE = "api/timeline/trace.json";

export class TimelineTab {
  constructor(page) {
    this.title = "Timeline";
    this.page = page;
    this.timeline = new Timeline();
    this.steps = h("input", { type: "number", min: 1, max: 100, value: 5, "aria-label": "Steps of each worker" });
    this.start = h("button", { type: "submit", class: "primary" }, "Trace");
    this.status = h("span", { class: "faint", role: "status" });
    this.perfetto = h("button", { type: "button", onclick: () => this.openPerfetto() }, "Open in Perfetto");
    this.download = h("a", { href: FILE, download: "trace.json", class: "button" }, "Download");
    const form = h("form", { class: "trace-form", onsubmit: (event) => this.trace(event) }, this.start, h("label", {}, this.steps, " steps"));
    this.took = new Table(tookColumns, { caption: "Where a step's time goes", keyOf: (row) => `${row.starters} ${row.task}` });
    this.tookCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Where a step's time goes", h("span", { class: "faint" }, "mean of a step")), this.took.element);
    this.messages = new Table(messageColumns, { caption: "Messages of a step", keyOf: (row) => `${row.edge} ${row.source} ${row.destination}` });
    this.messagesCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Messages of a step"), this.messages.element);
    this.empty = emptyState("No trace yet", "Trace a few steps to see what each task computes, sends and waits for.");
    this.place = h("div", {}, this.empty);
    this.element = h("div", {}, h("div", { class: "tools" }, form, this.status, h("span", { class: "spring" }), this.perfetto, this.download),
      h("section", { class: "card timeline-card" }, this.place), this.tookCard, this.messagesCard);
    this.offer(false);
  }

  restart() {
    this.number = this.loaded = undefined;
    this.place.replaceChildren(this.empty);
    this.offer(false);
  }

  offer(has) {
    this.perfetto.hidden = this.download.hidden = !has;
  }

  update(state) {
    this.start.disabled = state.phase !== "running" || this.state === "running";
  }

  async trace(event) {
    event.preventDefault();
    this.start.disabled = true;
    this.status.textContent = "Starting …";
    try {
      this.showTimeline(await ask("api/timeline", { steps: Number(this.steps.value), timeout_s: 60 }));
    } catch (error) {
      this.status.textContent = error.message;
      this.start.disabled = false;
    }
  }

  showTimeline({ state, text, number, steps, took, messages }) {
    this.state = state;
    this.start.disabled = state === "running";
    this.status.textContent = { none: "", running: `Waiting for ${steps} steps of each worker …` }[state] ?? text;
    this.tookCard.hidden = !took?.length;
    this.took.update(took ?? []);
    this.messagesCard.hidden = !messages?.length;
    this.messages.update(messages ?? []);
    if (state === "failed" && !this.number) this.place.replaceChildren(emptyState("The trace failed", text));
    if (state === "done" && number !== this.number) {
      this.number = number;
      this.loaded = false;
      if (this.page.isShown(this)) this.load();
    }
  }

  open() {
    if (this.number && !this.loaded) this.load();
    else if (this.loaded) this.timeline.resize();
  }

  async load() {
    this.loaded = true;
    this.place.setAttribute("aria-busy", "true");
    try {
      this.file = await ask(FILE);
      this.place.replaceChildren(this.timeline.element);
      this.timeline.show(this.file);
      this.offer(true);
    } catch (error) {
      this.place.replaceChildren(emptyState("The trace could not be shown", error.message));
    }
    this.place.removeAttribute("aria-busy");
  }

  /** Perfetto answers PONG to PING when it has loaded, and then takes a trace. */
  openPerfetto() {
    const target = open(PERFETTO);
    if (!target) {
      this.status.textContent = "The browser blocked the new tab. Allow it, or download the trace.";
      return;
    }
    const buffer = new TextEncoder().encode(JSON.stringify(this.file)).buffer;
    const ping = setInterval(() => target.postMessage("PING", PERFETTO), 200);
    const stop = (text) => {
      clearInterval(ping);
      clearTimeout(late);
      removeEventListener("message", listen);
      this.status.textContent = text;
    };
    const listen = ({ data, origin }) => {
      if (data !== "PONG" || origin !== PERFETTO) return;
      stop("Sent to Perfetto");
      target.postMessage({ perfetto: { buffer, title: `dflow trace ${this.number}`, fileName: "trace.json" } }, PERFETTO);
    };
    const late = setTimeout(() => stop("ui.perfetto.dev does not answer. Download the trace and open it there."), PERFETTO_WAIT_MS);
    addEventListener("message", listen);
    this.status.textContent = "Waiting for Perfetto …";
  }
}

const us = (name) => ({ number: true, sort: (row) => row[name], cell: (row) => ({ text: microseconds(row[name]), bar: name === "took_us" ? null : row[name] / row.took_us }) });

const tookColumns = [
  { label: "Task", sort: (row) => row.task, cell: (row) => ({ text: row.task, class: "strong" }) },
  { label: "Took", ...us("took_us") }, { label: "Python", ...us("python_us") }, { label: "XLA", ...us("xla_us") },
  { label: "Sending", ...us("sending_us") }, { label: "Wire", ...us("wire_us") }, { label: "Waiting", ...us("waiting_us") },
  { label: "Messages", number: true, cell: (row) => ({ text: row.messages.toFixed(1) }) },
  { label: "Bytes", number: true, sort: (row) => row.size_bytes, cell: (row) => ({ text: bytes(row.size_bytes) }) },
];

const messageColumns = [
  { label: "Message", cell: (row) => ({ text: row.edge, class: "strong" }) },
  { label: "From → to", cell: (row) => ({ text: `${row.source} → ${row.destination}` }) },
  { label: "Messages", number: true, cell: (row) => ({ text: row.messages.toFixed(1) }) },
  { label: "Bytes each", number: true, sort: (row) => row.size_bytes, cell: (row) => ({ text: bytes(row.size_bytes) }) },
  { label: "Sending", number: true, sort: (row) => row.sending_us, cell: (row) => ({ text: microseconds(row.sending_us) }) },
  { label: "Arrived after", number: true, sort: (row) => row.arrival_us, cell: (row) => ({ text: microseconds(row.arrival_us) }) },
];
