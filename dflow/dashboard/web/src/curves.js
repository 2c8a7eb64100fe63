// Curves of metrics and rates: one plot for each metric, one line for each task, and one cursor for all.
import uPlot from "uplot";
import { emptyState, h } from "./dom.js";
import { bytes, clock, number, percent } from "./format.js";
import { colour, darkMode, dashes, Numbering } from "./colours.js";
import { ask } from "./stream.js";

/** Points that a line keeps; the server thins what is older. */
const MOST_POINTS = 1200;
const HEIGHT = 210;
/** Distances of ticks, in s or steps. */
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8, 1e9];
/** uPlot's mode for empty points, which reach to the points of other lines beside them. */
const EXPANDED = 2;
/** A shorter silence, in s, is no gap of a line. */
const LEAST_GAP_S = 5;
const MOST_BANDS = 12;
const MOST_IN_TIP = 10;
/** Rates of the cluster come after metrics, as people look for the loss first. */
const LAST = ["steps/s", "processor", "bytes/s", "missed"];

export class Curves {
  constructor(page) {
    this.title = "Curves";
    this.page = page;
    this.series = new Map();
    this.plots = new Map();
    this.numbering = new Numbering();
    this.off = new Set();
    this.sync = uPlot.sync("curves");
    this.by = h("select", { "aria-label": "Horizontal axis", onchange: () => this.redraw() }, h("option", { value: "time" }, "by time"), h("option", { value: "step" }, "by step"));
    this.log = h("input", { type: "checkbox", onchange: () => this.rebuild() });
    this.filter = h("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", oninput: () => this.rebuild() });
    this.tasks = h("div", { class: "legend", role: "group", "aria-label": "Tasks" });
    this.grid = h("div", { class: "plots" });
    this.empty = emptyState("No curves yet", "Metrics that workers report, such as the loss, and the rates of all tasks appear after the first steps.");
    this.element = h("div", {}, h("div", { class: "tools" }, this.filter, this.by, h("label", {}, this.log, " logarithmic"), this.tasks), this.grid);
    darkMode.addEventListener("change", () => this.rebuild());
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.grid);
  }

  restart() {
    this.series.clear();
    this.rebuild();
  }

  async refetch() {
    const { runs } = this.page;
    this.pending = true;
    try {
      const { series } = await ask("api/history");
      if (runs !== this.page.runs) return;
      this.series = new Map(series.map((one) => [one.id, one]));
      this.rebuild();
    } catch {
      // The banner tells that the connection is lost; the curves stay.
    } finally {
      if (runs === this.page.runs) this.pending = false;
    }
  }

  add({ at_s, step, values }) {
    let isNew = false;
    for (const [id, value] of Object.entries(values)) {
      const one = this.series.get(id);
      if (!one) {
        isNew = true;
        continue;
      }
      if (at_s <= (one.at_s.at(-1) ?? -1)) continue;
      for (const [list, item] of [[one.at_s, at_s], [one.step, step], [one.value, value], [one.low, value], [one.high, value]]) {
        list.push(item);
        if (list.length > MOST_POINTS) list.shift();
      }
    }
    if (isNew && !this.pending) this.refetch();
    else if (this.page.isShown(this)) this.redraw();
    else this.old = true;
  }

  open() {
    this.element.isConnected && (this.resize(), this.redraw());
  }

  /** Series by the name of their metric; a queue has a plot of its own. */
  grouped() {
    const wanted = this.filter.value.toLowerCase();
    const groups = new Map();
    for (const one of this.series.values()) {
      if (!one.name.toLowerCase().includes(wanted) || !one.at_s.length) continue;
      const name = one.name === "steps/s" && !one.task ? "steps/s of the cluster" : one.name;
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(one);
    }
    const rank = (name) => LAST.findIndex((last) => name.startsWith(last)) + (name.startsWith("queue ") ? 10 : 0);
    return [...groups].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
  }

  rebuild() {
    for (const { plot } of this.plots.values()) plot.destroy();
    this.plots.clear();
    const groups = this.grouped();
    const tasks = [...new Set([...this.series.values()].map((one) => one.task).filter(Boolean))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    tasks.forEach((task) => this.numbering.of(task));
    this.tasks.replaceChildren(...(tasks.length > 1 ? tasks.map((task) => this.taskButton(task)) : []));
    this.grid.replaceChildren(...groups.map(([name, all]) => this.card(name, all)));
    if (!groups.length) this.grid.replaceChildren(this.filter.value ? emptyState("No such metric", "Change or clear the filter.") : this.empty);
    this.redraw();
  }

  taskButton(task) {
    const button = h("button", { type: "button", "aria-pressed": String(!this.off.has(task)), onclick: () => {
      if (!this.off.delete(task)) this.off.add(task);
      this.rebuild();
    } }, h("i", { style: `background:${this.lineColour(task)}` }), task);
    return button;
  }

  /** The vertical scale: it has room for the range of the values that each point stands for. */
  scale(name, shown) {
    if (this.log.checked && shown.some((one) => one.value.some((value) => value > 0))) return { distr: 3 };
    const range = (plot, least, most) => {
      const { min, max } = plot.scales.x;
      const spans = this.plots.get(name)?.spans ?? [];
      const all = (list) => spans.flatMap((span) => span[list].filter((value, at) => value !== null && span.xs[at] >= min && span.xs[at] <= max));
      const [low, high] = [all("lows").reduce((a, b) => Math.min(a, b), least), all("highs").reduce((a, b) => Math.max(a, b), most)];
      return low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, true);
    };
    return { range };
  }

  lineColour(task) {
    return task ? colour(this.numbering.of(task)) : colour(0);
  }

  card(name, all) {
    const shown = all.filter((one) => !this.off.has(one.task));
    const unit = all[0].unit;
    const place = h("div", { class: "plot" });
    const newest = h("span", { class: "newest" });
    const card = h("section", { class: "card", "aria-label": `Curve of ${name}` },
      h("h2", {}, name, unit && unit !== "1/s" && !name.includes(unit) ? h("span", { class: "faint" }, unit) : null, h("span", { class: "spring" }), newest), place);
    const css = getComputedStyle(document.documentElement);
    const [faint, line] = ["--faint", "--line"].map((variable) => css.getPropertyValue(variable).trim());
    const axis = { stroke: faint, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const show = unitFormat(unit);
    const options = {
      width: 300, height: HEIGHT, legend: { show: false },
      cursor: { sync: { key: "curves", setSeries: false, scales: ["x", null] }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { ...this.scale(name, shown) } },
      axes: [
        { ...axis, size: 26, space: 70, incrs: TICKS, values: (_, ticks) => ticks.map((tick) => (this.by.value === "time" ? clock(tick) : number(tick))) },
        { ...axis, size: (plot, ticks) => Math.max(38, 8 + 6.4 * Math.max(0, ...(ticks ?? []).map((tick) => String(tick).length))), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : show(tick))) },
      ],
      series: [{}, ...shown.map((one) => ({ label: one.task || " ", stroke: this.lineColour(one.task), dash: one.task ? dashes(this.numbering.of(one.task)) : undefined, width: 1.75, spanGaps: false, points: { show: false } }))],
      plugins: [bands(() => this.plots.get(name)?.spans ?? []), tip(show, (at) => (this.by.value === "time" ? clock(at) : `step ${number(at)}`))],
    };
    const plot = new uPlot(options, [[], ...shown.map(() => [])], place);
    this.plots.set(name, { plot, shown, place, newest, show });
    return card;
  }

  resize() {
    for (const { plot, place } of this.plots.values()) {
      const width = Math.floor(place.clientWidth);
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }

  redraw() {
    if (!this.page.isShown(this)) return;
    this.resize();
    for (const entry of this.plots.values()) {
      const tables = entry.shown.map((one) => this.points(one));
      const data = tables.length ? uPlot.join(tables.map(([xs, ys]) => [xs, ys]), tables.map(() => [0, EXPANDED])) : [[]];
      entry.spans = tables.map(([xs, , lows, highs]) => ({ xs, lows, highs }));
      if (isZoomed(entry.plot)) {
        entry.plot.setData(data, false);
        entry.plot.redraw();
      } else entry.plot.setData(data);
      const values = entry.shown.map((one) => one.value.at(-1)).filter((value) => value !== null && value !== undefined);
      entry.newest.textContent = values.length ? (values.length > 1 ? `${entry.show(Math.min(...values))} – ${entry.show(Math.max(...values))}` : entry.show(values[0])) : "";
    }
  }

  /** Columns x, value, low and high with x growing; after a return to a snapshot the newer of equal steps counts. */
  points(one) {
    if (this.by.value === "time") return withGaps(one);
    const newest = new Map(one.step.map((step, index) => [step, index]));
    const order = [...newest.keys()].filter((step) => step !== null).sort((a, b) => a - b);
    return [order, ...[one.value, one.low, one.high].map((list) => order.map((step) => list[newest.get(step)]))];
  }
}

/** Whether a plot shows only a part of its points, because the user has chosen it. */
function isZoomed({ scales, data: [xs] }) {
  return xs.length > 1 && scales.x.min !== null && (scales.x.min > xs[0] || scales.x.max < xs.at(-1));
}

/** Columns by time, with an empty point where a task was silent for long, so that no line leads over its absence. */
function withGaps({ at_s, value, low, high }) {
  const usual = [...at_s.slice(1).map((at, index) => at - at_s[index])].sort((a, b) => a - b)[Math.floor(at_s.length / 2)] ?? 0;
  const columns = [[], [], [], []];
  at_s.forEach((at, index) => {
    const before = at_s[index - 1];
    if (at - before > Math.max(LEAST_GAP_S, 4 * usual)) [(at + before) / 2, null, null, null].forEach((item, column) => columns[column].push(item));
    [at, value[index], low[index], high[index]].forEach((item, column) => columns[column].push(item));
  });
  return columns;
}

function unitFormat(unit) {
  if (unit === "B/s") return (value) => `${bytes(value)}/s`;
  if (unit === "cores") return percent;
  return (value) => number(value, 4);
}

/** Shades the range of the values that a point stands for, unless there are too many lines for it to be seen. */
function bands(spans) {
  const drawn = (plot) => {
    if (spans().length > MOST_BANDS) return;
    const { ctx, bbox } = plot;
    const at = (value, x) => [plot.valToPos(x, "x", true), plot.valToPos(value, "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.globalAlpha = 0.15;
    spans().forEach(({ xs, lows, highs }, index) => {
      ctx.fillStyle = plot.series[index + 1].stroke();
      for (let from = 0; from < xs.length; from++) {
        let to = from;
        while (to < xs.length && lows[to] !== null && highs[to] !== null) to++;
        ctx.beginPath();
        for (let place = from; place < to; place++) ctx.lineTo(...at(highs[place], xs[place]));
        for (let place = to - 1; place >= from; place--) ctx.lineTo(...at(lows[place], xs[place]));
        ctx.fill();
        from = to;
      }
    });
    ctx.restore();
  };
  return { hooks: { drawAxes: drawn } };
}

/** The values at the cursor. */
function tip(show, place) {
  const element = h("div", { class: "tip", hidden: true });
  const moved = (plot) => {
    const { idx, left } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) {
      element.hidden = true;
      return;
    }
    const rows = plot.series.slice(1).map((series, index) => ({ label: series.label, stroke: series.stroke(), value: nearest(plot.data[index + 1], idx) }))
      .filter(({ value }) => value !== null).sort((a, b) => b.value - a.value);
    const shown = rows.slice(0, MOST_IN_TIP);
    element.hidden = !rows.length;
    element.replaceChildren(h("b", {}, place(plot.data[0][idx])),
      ...shown.map(({ label, stroke, value }) => h("span", {}, h("i", { style: `background:${stroke}` }), label, h("em", {}, show(value)))),
      rows.length > shown.length ? h("span", { class: "faint" }, `and ${rows.length - shown.length} more`) : "");
    const isRight = left > plot.over.clientWidth / 2;
    element.style.left = isRight ? "" : `${left + 12}px`;
    element.style.right = isRight ? `${plot.over.clientWidth - left + 12}px` : "";
  };
  return { hooks: { init: (plot) => plot.over.append(element), setCursor: moved, setData: moved } };
}

/** The value at an index or the newest before it: lines of other tasks have points at other times. */
function nearest(values, index) {
  for (let at = index; at >= Math.max(0, index - 8); at--) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}
