// A trace on a canvas: a group of rows for each task, zoom and pan, arrows of messages, and a panel about a slice.
import { h } from "./dom.js";
import { colour, darkMode } from "./colours.js";
import { microseconds } from "./format.js";

const GUTTER = 150;
const AXIS = 26;
const ROW = 19;
const HEAD = 26;
const MOST_HEIGHT = 560;
/** With more arrows in view, only those of the selected slice are drawn. */
const MOST_ARROWS = 40;
const COLOURS = { steps: 7, "parts of steps": 5, Python: 4, XLA: 2, messages: 0, waits: 1, "branches and loops": 3 };

/** The tasks of a trace in the Trace Event Format, each with its tracks and their slices by depth. */
export function tasksOf(events) {
  const tasks = new Map();
  const arrows = new Map();
  const task = (pid) => {
    if (!tasks.has(pid)) tasks.set(pid, { pid, name: `process ${pid}`, tracks: new Map(), instants: [] });
    return tasks.get(pid);
  };
  const track = ({ pid, tid }) => {
    const { tracks } = task(pid);
    if (!tracks.has(tid)) tracks.set(tid, { pid, tid, name: "", slices: [], depth: 1 });
    return tracks.get(tid);
  };
  for (const event of events) {
    if (event.ph === "M" && event.name === "process_name") task(event.pid).name = event.args.name;
    else if (event.ph === "M" && event.name === "thread_name") track(event).name = event.args.name;
    else if (event.ph === "X") track(event).slices.push({ name: event.name, cat: event.cat, from: event.ts, to: event.ts + event.dur, args: event.args ?? {} });
    else if (event.ph === "i") task(event.pid).instants.push({ name: event.name, at: event.ts });
    else if (event.ph === "s" || event.ph === "f") {
      if (!arrows.has(event.id)) arrows.set(event.id, {});
      arrows.get(event.id)[event.ph] = { pid: event.pid, tid: event.tid, at: event.ts };
    }
  }
  for (const { tracks } of tasks.values()) {
    for (const one of tracks.values()) {
      one.slices.sort((a, b) => a.from - b.from || b.to - a.to);
      const ends = [];
      for (const slice of one.slices) {
        while (ends.length && ends.at(-1) <= slice.from) ends.pop();
        slice.depth = ends.length;
        slice.track = one;
        ends.push(slice.to);
        one.depth = Math.max(one.depth, ends.length);
      }
    }
  }
  return { tasks: [...tasks.values()], arrows: [...arrows.values()].filter(({ s, f }) => s && f) };
}

export class Timeline {
  constructor() {
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Timeline. Left and right move, up and down scroll, plus and minus zoom, 0 fits, n and p select the next and previous slice." });
    this.spacer = h("div", {}, this.canvas);
    this.scroll = h("div", { class: "timeline-scroll" }, this.spacer);
    this.legend = h("div", { class: "legend" });
    this.details = h("div", { class: "timeline-details", "aria-live": "polite" });
    this.tip = h("div", { class: "tip", hidden: true });
    const button = (text, title, act) => h("button", { type: "button", title, "aria-label": title, onclick: act }, text);
    this.element = h("div", { class: "timeline" },
      h("div", { class: "tools" }, this.legend, h("span", { class: "spring" }), button("+", "Zoom in", () => this.zoom(1.6)), button("−", "Zoom out", () => this.zoom(1 / 1.6)), button("Fit", "Fit the trace", () => this.fit())),
      h("div", { class: "timeline-frame" }, this.scroll, this.tip), this.details);
    this.folded = new Set();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.scroll);
    darkMode.addEventListener("change", () => this.draw());
  }

  show(file) {
    Object.assign(this, tasksOf(file.traceEvents));
    const slices = this.tasks.flatMap(({ tracks }) => [...tracks.values()].flatMap((track) => track.slices));
    this.start = slices.reduce((start, slice) => Math.min(start, slice.from), Infinity); // too many for arguments of a call
    this.end = slices.reduce((end, slice) => Math.max(end, slice.to), -Infinity);
    if (!slices.length) [this.start, this.end] = [0, 1];
    this.selected = null;
    this.legend.replaceChildren(...Object.keys(COLOURS).filter((cat) => slices.some((slice) => slice.cat === cat)).map((cat) => h("span", {}, h("i", { style: `background:${colour(COLOURS[cat])}` }), cat)));
    this.about();
    this.arrange();
    this.fit();
  }

  /** Rows from top to bottom; a folded task is its header alone. */
  arrange() {
    this.rows = [];
    let top = AXIS;
    for (const task of this.tasks) {
      this.rows.push({ top, height: HEAD, task });
      top += HEAD;
      let name = "";
      for (const track of this.folded.has(task.pid) ? [] : task.tracks.values()) {
        this.rows.push({ top, height: ROW * track.depth + 4, task, track, label: track.name === name ? "" : track.name });
        name = track.name;
        top += ROW * track.depth + 4;
      }
    }
    this.height = top + 6;
    this.resize();
  }

  fit() {
    const room = 0.01 * (this.end - this.start) || 1;
    this.view = { from: this.start - room, to: this.end + room };
    this.draw();
  }

  resize() {
    if (!this.rows) return;
    const width = this.scroll.clientWidth;
    const height = Math.min(this.height, MOST_HEIGHT);
    if (!width) return;
    this.scroll.style.height = `${height}px`;
    this.spacer.style.height = `${this.height}px`;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    Object.assign(this, { width, shownHeight: height, ratio });
    this.draw();
  }

  x(at) {
    return GUTTER + ((at - this.view.from) / (this.view.to - this.view.from)) * (this.width - GUTTER);
  }

  at(x) {
    return this.view.from + ((x - GUTTER) / (this.width - GUTTER)) * (this.view.to - this.view.from);
  }

  draw() {
    if (!this.rows || !this.width || !this.view) return;
    const css = getComputedStyle(document.documentElement);
    this.ink = Object.fromEntries(["text", "faint", "line", "surface", "raised", "accent"].map((name) => [name, css.getPropertyValue(`--${name}`).trim()]));
    const context = this.canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.shownHeight);
    context.textBaseline = "middle";
    const offset = this.scroll.scrollTop;
    this.drawGrid(context);
    for (const row of this.rows) {
      const top = row.top - offset;
      if (top > this.shownHeight || top + row.height < AXIS) continue;
      if (row.track) this.drawTrack(context, row, top);
      else this.drawHead(context, row, top);
    }
    this.drawArrows(context, offset);
    this.drawLabels(context, offset);
    this.drawAxis(context);
  }

  ticks() {
    const span = this.view.to - this.view.from;
    const rough = span / Math.max(2, (this.width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const first = Math.ceil(this.view.from / step) * step;
    return Array.from({ length: Math.floor((this.view.to - first) / step) + 1 }, (_, index) => first + index * step);
  }

  drawGrid(context) {
    context.fillStyle = this.ink.line;
    for (const tick of this.ticks()) context.fillRect(this.x(tick), AXIS, 1, this.shownHeight);
  }

  drawAxis(context) {
    context.fillStyle = this.ink.surface;
    context.fillRect(0, 0, this.width, AXIS - 1);
    context.fillStyle = this.ink.line;
    context.fillRect(0, AXIS - 1, this.width, 1);
    context.fillStyle = this.ink.faint;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    for (const tick of this.ticks()) if (this.x(tick) >= GUTTER) context.fillText(Math.abs(tick) < 1e-9 ? "0" : microseconds(tick), this.x(tick) + 4, AXIS / 2);
  }

  drawHead(context, row, top) {
    context.fillStyle = this.ink.raised;
    context.fillRect(0, top, this.width, HEAD - 2);
    context.fillStyle = this.ink.faint;
    for (const { at } of row.task.instants) context.fillRect(this.x(at), top + 2, 2, HEAD - 6);
  }

  drawTrack(context, row, top) {
    const { slices } = row.track;
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.shownHeight);
    context.clip();
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    for (const slice of slices) {
      if (slice.from > this.view.to) break;
      if (slice.to < this.view.from) continue;
      const [left, right] = [Math.max(this.x(slice.from), GUTTER - 4), Math.min(this.x(slice.to), this.width + 4)];
      const [y, wide] = [top + 2 + slice.depth * ROW, Math.max(right - left, 1)];
      const ink = colour(COLOURS[slice.cat] ?? 7);
      context.fillStyle = ink;
      context.globalAlpha = wide < 4 ? 0.9 : 0.3;
      context.fillRect(left, y, wide, ROW - 2);
      context.globalAlpha = 1;
      if (wide >= 4) context.fillRect(left, y, 2.5, ROW - 2);
      if (slice === this.selected) {
        context.strokeStyle = this.ink.text;
        context.lineWidth = 1.5;
        context.strokeRect(left + 0.5, y + 0.5, wide - 1, ROW - 3);
      }
      if (wide > 28) {
        context.fillStyle = this.ink.text;
        context.fillText(fitted(context, slice.name, wide - 10), left + 6, y + (ROW - 2) / 2);
      }
    }
    context.restore();
  }

  drawLabels(context, offset) {
    context.textAlign = "left";
    for (const row of this.rows) {
      const top = row.top - offset;
      if (top > this.shownHeight || top + row.height < AXIS) continue;
      if (!row.track) {
        context.fillStyle = this.ink.text;
        context.font = "600 12px system-ui, sans-serif";
        context.fillText(`${this.folded.has(row.task.pid) ? "▸" : "▾"} ${row.task.name}`, 8, top + HEAD / 2 - 1);
        continue;
      }
      context.fillStyle = this.ink.surface;
      context.fillRect(0, top, GUTTER - 1, row.height);
      context.fillStyle = this.ink.faint;
      context.font = "11px system-ui, sans-serif";
      context.fillText(fitted(context, row.label, GUTTER - 30), 22, top + 2 + ROW / 2);
    }
    context.fillStyle = this.ink.line;
    context.fillRect(GUTTER - 1, AXIS, 1, this.shownHeight);
  }

  drawArrows(context, offset) {
    const rowOf = new Map(this.rows.filter((row) => row.track).map((row) => [`${row.task.pid} ${row.track.tid}`, row]));
    let seen = this.arrows.filter(({ s, f }) => f.at >= this.view.from && s.at <= this.view.to);
    if (seen.length > MOST_ARROWS) seen = seen.filter(({ s, f }) => this.isSelected(s) || this.isSelected(f));
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.shownHeight);
    context.clip();
    context.strokeStyle = context.fillStyle = this.ink.accent;
    context.globalAlpha = 0.65;
    for (const { s, f } of seen) {
      const [from, to] = [rowOf.get(`${s.pid} ${s.tid}`), rowOf.get(`${f.pid} ${f.tid}`)];
      if (!from || !to) continue;
      const [x, y, toX, toY] = [this.x(s.at), from.top - offset + ROW / 2, this.x(f.at), to.top - offset + ROW / 2];
      const bend = Math.min(60, Math.max(14, (toX - x) / 2));
      context.beginPath();
      context.moveTo(x, y);
      context.bezierCurveTo(x + bend, y, toX - bend, toY, toX, toY);
      context.stroke();
      context.beginPath();
      context.moveTo(toX, toY);
      context.lineTo(toX - 6, toY - 3);
      context.lineTo(toX - 6, toY + 3);
      context.fill();
    }
    context.restore();
  }

  /** Whether the end of an arrow is at the selected slice. */
  isSelected({ tid, at, pid }) {
    const slice = this.selected;
    return slice?.track.tid === tid && slice.track.pid === pid && slice.from <= at && at <= slice.to;
  }

  listen() {
    this.scroll.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this.canvas) return;
      event.preventDefault();
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / this.width);
      else this.zoom(Math.exp(-event.deltaY * 0.002), x);
    }, { passive: false });
    let drag = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, view: { ...this.view }, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!drag) return this.hover(event);
      const by = ((drag.x - event.clientX) / (this.width - GUTTER)) * (drag.view.to - drag.view.from);
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      this.view = { from: drag.view.from + by, to: drag.view.to + by };
      this.draw();
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.pick(event);
      drag = null;
    });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("dblclick", () => this.selected && this.zoomTo(this.selected));
    this.canvas.addEventListener("keydown", (event) => this.onkey(event));
  }

  onkey(event) {
    const acts = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), ArrowUp: () => this.scroll.scrollBy(0, -60), ArrowDown: () => this.scroll.scrollBy(0, 60),
      "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), 0: () => this.fit(),
      n: () => this.next(1), p: () => this.next(-1), Enter: () => this.selected && this.zoomTo(this.selected),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }

  pan(share) {
    const by = share * (this.view.to - this.view.from);
    this.view = { from: this.view.from + by, to: this.view.to + by };
    this.draw();
  }

  zoom(by, x = (this.width + GUTTER) / 2) {
    const at = this.at(Math.max(GUTTER, x));
    const whole = this.end - this.start || 1;
    const factor = Math.min(Math.max((this.view.to - this.view.from) / by, whole / 1e6), 4 * whole) / (this.view.to - this.view.from);
    this.view = { from: at - (at - this.view.from) * factor, to: at + (this.view.to - at) * factor };
    this.draw();
  }

  zoomTo({ from, to }) {
    const room = 0.3 * (to - from) || 1;
    this.view = { from: from - room, to: to + room };
    this.draw();
  }

  next(by) {
    const rows = this.rows.filter((row) => row.track?.slices.length);
    const row = rows.find(({ track }) => track === this.selected?.track) ?? rows[0];
    if (!row) return;
    const index = row.track.slices.indexOf(this.selected) + by;
    this.selected = row.track.slices[Math.max(0, Math.min(row.track.slices.length - 1, index))];
    if (this.selected.from < this.view.from || this.selected.to > this.view.to) this.zoomTo(this.selected);
    this.about();
    this.draw();
  }

  found({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [clientX - box.left, clientY - box.top + this.scroll.scrollTop];
    const row = this.rows.find((one) => y >= one.top && y < one.top + one.height);
    if (!row?.track || x < GUTTER) return { row, x };
    const depth = Math.floor((y - row.top - 2) / ROW);
    const [low, high] = [this.at(x - 2), this.at(x + 2)];
    const slice = row.track.slices.findLast((one) => one.depth === depth && one.from <= high && one.to >= low);
    return { row, slice, x };
  }

  hover(event) {
    const { slice, x } = this.found(event);
    this.tip.hidden = !slice;
    this.canvas.style.cursor = slice ? "pointer" : "grab";
    if (!slice) return;
    this.tip.replaceChildren(h("b", {}, slice.name), h("span", {}, microseconds(slice.to - slice.from)), slice.args.line ? h("span", { class: "faint" }, slice.args.line) : "");
    const box = this.canvas.getBoundingClientRect();
    this.tip.style.left = `${Math.min(x + 12, this.width - 240)}px`;
    this.tip.style.top = `${event.clientY - box.top + 14}px`;
  }

  pick(event) {
    const { row, slice } = this.found(event);
    this.canvas.focus();
    if (row && !row.track) {
      if (!this.folded.delete(row.task.pid)) this.folded.add(row.task.pid);
      this.arrange();
      return;
    }
    this.selected = slice ?? null;
    this.about();
    this.draw();
  }

  about() {
    const slice = this.selected;
    if (!slice) {
      this.details.replaceChildren(h("p", { class: "faint" }, "Click a slice for its details. Drag to move; click, then turn the wheel to zoom; double-click to zoom to a slice. A click on a task's name folds it."));
      return;
    }
    const task = this.tasks.find(({ tracks }) => [...tracks.values()].includes(slice.track));
    const rows = [["Task", task.name], ["Track", slice.track.name], ["Start", microseconds(slice.from)], ["Duration", microseconds(slice.to - slice.from)],
      ...Object.entries(slice.args).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)])];
    this.details.replaceChildren(h("h3", {}, slice.name), h("dl", {}, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  }
}

function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}
