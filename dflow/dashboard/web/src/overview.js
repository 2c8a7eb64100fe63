// The state of the cluster: figures, tasks, traffic, variables.
import { emptyState, h, setText, Table } from "./dom.js";
import { bytes, clock, counted, number, percent, rate, seconds } from "./format.js";

/** A shape with each colour, so that a state is told without colours. */
const SHAPES = { ok: "●", warn: "▲", bad: "■", off: "○" };
const NEWEST = 5;

export class Overview {
  constructor(page) {
    this.title = "Overview";
    this.page = page;
    this.figures = new Map();
    this.figuresElement = h("div", { class: "figures" });
    this.alerts = h("div", { class: "alerts" });
    this.only = h("select", { "aria-label": "Show tasks", onchange: () => this.update(page.state) },
      h("option", { value: "all" }, "all tasks"), h("option", { value: "trouble" }, "need attention"));
    this.tasks = new Table(taskColumns(), { caption: "Tasks", keyOf: (task) => `${task.task} ${task.joined_at_s}` });
    this.left = h("p", { class: "faint more" });
    this.edges = new Table(edgeColumns(() => this.mostBytes), { caption: "Bytes per edge", keyOf: (edge) => `${edge.edge} ${edge.source} ${edge.destination}` });
    this.variables = new Table(variableColumns, { caption: "Variables", keyOf: (variable) => variable.name });
    this.results = h("div", { class: "facts" });
    this.newest = h("ol", { class: "events small" });
    const card = (title, extra, ...children) => h("section", { class: "card" }, h("h2", {}, title, h("span", { class: "spring" }), extra), ...children);
    this.cards = {
      tasks: card("Tasks", this.only, this.tasks.element, this.left),
      edges: card("Bytes per edge", null, this.edges.element),
      variables: card("Variables", this.variablesTotal = h("span", { class: "faint" }), this.variables.element),
      events: card("Newest events", h("a", { href: "#events" }, "all events"), this.newest),
      results: card("Results", null, this.results),
    };
    this.waiting = emptyState("Connecting to the coordinator", "The first state appears within a second or two.");
    this.element = h("div", {}, this.waiting);
  }

  update(state) {
    if (!state) return;
    if (state.at_s === null) {
      this.waiting.querySelector("p").textContent = state.phase_text || "The first state appears within a second or two.";
      return;
    }
    if (this.element.contains(this.waiting)) {
      this.element.replaceChildren(this.figuresElement, this.alerts, this.cards.tasks,
        h("div", { class: "columns" }, h("div", {}, this.cards.edges, this.cards.variables), h("div", {}, this.cards.events, this.cards.results)));
    }
    this.showFigures(state);
    this.showAlerts(state);
    const trouble = (task) => task.level === "warn" || task.level === "bad";
    const shown = this.only.value === "all" ? state.tasks : state.tasks.filter(trouble);
    this.tasks.update(shown);
    const hidden = state.tasks_left_out ? `${counted(state.tasks_left_out, "task")} more. ` : "";
    setText(this.left, hidden + (shown.length ? "" : this.only.value === "all" ? "No task has joined yet." : "No task needs attention."));
    this.mostBytes = Math.max(1, ...state.edges.map((edge) => edge.bytes_per_s ?? 0));
    this.edges.update(state.edges.slice(0, 25));
    this.cards.edges.hidden = !state.edges.length;
    this.variables.update(state.variables.slice(0, 25));
    this.cards.variables.hidden = !state.variables.length;
    setText(this.variablesTotal, `${counted(state.variables.length + state.variables_left_out, "variable")}, ${bytes(state.variables_bytes)}`);
    const results = Object.entries(state.results);
    this.cards.results.hidden = !results.length;
    this.results.replaceChildren(...results.map(([name, value]) => h("div", {}, h("span", {}, name), h("b", {}, number(value, 5)))));
  }

  /** Update the figures at the top; each is kept, so that only its text changes. */
  showFigures(state) {
    const live = state.tasks.filter((task) => task.level === "ok").length;
    const trouble = state.tasks.filter((task) => task.level === "warn" || task.level === "bad").length;
    const left = state.tasks.filter((task) => task.state === "left").length;
    const restarts = state.tasks.reduce((sum, task) => sum + (task.restarts ?? 0), 0);
    const times = state.tasks.map((task) => task.step_s).filter((time) => time > 0).sort((a, b) => a - b);
    const median = times.length ? times[Math.floor((times.length - 1) / 2)] : null;
    const perS = state.tasks.reduce((sum, task) => sum + (task.bytes_per_s ?? 0), 0);
    const { done, total, per_s } = state.steps;
    const shot = state.snapshot;
    const figures = [
      ["Steps per second", rate(per_s), total ? `${percent(done / total)} of ${number(total)} steps` : counted(done, "step")],
      ["Step time", seconds(median), times.length > 1 ? `median of ${times.length}; slowest ${seconds(times.at(-1))}` : ""],
      ["Tasks", `${live} live`, [trouble && `${trouble} need${trouble === 1 ? "s" : ""} attention`, left && `${left} left`, restarts && counted(restarts, "restart")].filter(Boolean).join(", ") || "none needs attention", trouble ? "warn" : ""],
      ["Sent", `${bytes(perS)}/s`, `${bytes(state.sent_bytes)} so far`],
      ["Snapshot", shot ? `number ${shot.number}` : "none yet", shot ? `${bytes(shot.written_bytes)} written of ${bytes(shot.full_bytes)}` : "no snapshot since the start"],
    ];
    for (const [name, value, detail, level] of figures) {
      if (!this.figures.has(name)) {
        const parts = { value: h("b"), detail: h("span", { class: "faint" }) };
        parts.element = h("div", { class: "figure" }, h("span", { class: "label" }, name), parts.value, parts.detail);
        this.figures.set(name, parts);
        this.figuresElement.append(parts.element);
      }
      const parts = this.figures.get(name);
      setText(parts.value, value || "–");
      setText(parts.detail, detail);
      parts.detail.dataset.level = level || "";
    }
  }

  showAlerts(state) {
    const texts = state.not_finite.map(({ run, metric, value, step, task }) => `${metric} was ${value} at step ${step} of ${run} on ${task}.`);
    const key = texts.join("\n");
    if (this.alertsSeen === key) return;
    this.alertsSeen = key;
    this.alerts.replaceChildren(...texts.slice(0, 5).map((text) => h("p", { class: "banner", "data-level": "bad" }, text)));
  }

  showEvents(events) {
    const newest = events.slice(-NEWEST).reverse();
    this.newest.replaceChildren(...(newest.length ? newest.map(eventRow) : [h("li", { class: "faint" }, "Nothing has happened yet: joins, deaths and snapshots appear here.")]));
  }
}

export function eventRow({ at_s, kind, task, text }) {
  const level = { left: "bad", stalled: "bad", restarted: "warn", returned: "warn", joined: "ok", snapshot: "ok" }[kind] ?? "off";
  return h("li", { "data-kind": kind }, h("time", {}, clock(at_s)), h("span", { class: "kind", "data-level": level }, `${SHAPES[level]} ${kind}`),
    h("span", { class: "event-text" }, task && !text.includes(task) ? `${task}: ${text}` : text));
}

function taskColumns() {
  const value = (name, show) => (task) => ({ text: show(task[name]) });
  return [
    { label: "Task", sort: (task) => task.task, cell: (task) => ({ text: task.task, class: "strong", title: task.address }) },
    { label: "State", sort: (task) => task.text, cell: (task) => ({ text: `${SHAPES[task.level]} ${task.text}`, class: `state ${task.level}` }) },
    { label: "Steps/s", number: true, sort: (task) => task.steps_per_s, cell: (task) => ({ text: task.steps ? rate(task.steps_per_s) : "" }) },
    { label: "Step time", number: true, sort: (task) => task.step_s, cell: (task) => ({ text: task.step_s ? seconds(task.step_s) : "" }) },
    { label: "Parts/s", number: true, sort: (task) => task.parts_per_s, cell: value("parts_per_s", rate) },
    { label: "Processor", number: true, sort: (task) => task.processor, cell: (task) => ({ text: percent(task.processor), bar: task.processor }) },
    { label: "Run/wait", number: true, cell: (task) => ({ text: task.running === null ? "" : `${task.running} / ${task.waiting}`, title: "parts of steps that run, and values awaited" }) },
    { label: "Queues", cell: (task) => queueCell(task) },
    { label: "Restarts", number: true, sort: (task) => task.restarts, cell: (task) => ({ text: task.restarts ? String(task.restarts) : "", class: "restarts" }) },
    { label: "Missed", number: true, sort: (task) => task.missed, cell: (task) => ({ text: number(task.missed, 2), title: "staleness: updates by other steps between a read and the own update" }) },
    { label: "Heard", number: true, sort: (task) => task.heard_s, cell: (task) => ({ text: task.level === "off" ? "" : task.heard_s === null ? "never" : `${task.heard_s.toFixed(1)} s ago` }) },
    { label: "Doing", cell: (task) => ({ text: task.doing, class: "doing", title: task.doing }) },
  ];
}

function queueCell({ queues, queues_left_out }) {
  const shown = queues.slice(0, 3).map(({ name, size, capacity }) => `${name} ${size}${capacity ? `/${capacity}` : ""}`);
  const more = queues.length - shown.length + (queues_left_out ?? 0);
  const first = queues[0];
  return { text: shown.join(", ") + (more ? ` and ${more} more` : ""), bar: first?.capacity ? first.size / first.capacity : null };
}

function edgeColumns(most) {
  return [
    { label: "Edge", cell: (edge) => ({ text: edge.edge, class: "strong" }) },
    { label: "From → to", cell: (edge) => ({ text: `${edge.source} → ${edge.destination}` }) },
    { label: "Now", number: true, sort: (edge) => edge.bytes_per_s, cell: (edge) => ({ text: edge.bytes_per_s ? `${bytes(edge.bytes_per_s)}/s` : "", bar: edge.bytes_per_s ? edge.bytes_per_s / most() : null }) },
    { label: "Messages/s", number: true, sort: (edge) => edge.messages_per_s, cell: (edge) => ({ text: edge.messages_per_s ? rate(edge.messages_per_s) : "" }) },
    { label: "In all", number: true, sort: (edge) => edge.size_bytes, cell: (edge) => ({ text: bytes(edge.size_bytes) }) },
  ];
}

const variableColumns = [
  { label: "Name", sort: (variable) => variable.name, cell: (variable) => ({ text: variable.name, class: "strong" }) },
  { label: "Type", cell: (variable) => ({ text: variable.kind === "variable" ? variable.type : `${variable.kind} ${variable.type}` }) },
  { label: "Size", number: true, sort: (variable) => variable.size_bytes, cell: (variable) => ({ text: bytes(variable.size_bytes) }) },
  { label: "Task", sort: (variable) => variable.task, cell: (variable) => ({ text: variable.task }) },
];
