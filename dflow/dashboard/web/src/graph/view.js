// A graph with groups that fold: drawn as SVG, with search, zoom and pan, and a panel about the selected box.
import { h, s, emptyState } from "../dom.js";
import { bytes, counted, microseconds } from "../format.js";
import { colour, darkMode, Numbering } from "../colours.js";
import { GraphModel } from "./model.js";
import { Layouter } from "./layouter.js";
import { aboutGraph, aboutNode } from "./panel.js";

const HEADER = 22;
const MOST_FOUND = 60;
/** A box that more boxes take values from is joined to them only while it is selected. */
const MOST_TAKERS = 10;
/** Edge labels are drawn up to this number of edges. */
const MOST_LABELS = 160;
/** What is drawn before the first layout of a graph. */
const NOTHING = { layout: { boxes: [], groups: [], edges: [], width: 0, height: 0 }, sizes: new Map(), edges: [], far: [] };
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

const measuring = document.createElement("canvas").getContext("2d");
const widths = new Map();
function textWidth(text, bold) {
  const key = `${bold ? "b" : ""}${text}`;
  if (!widths.has(key)) {
    measuring.font = `${bold ? "600 " : ""}${FONT}`;
    widths.set(key, measuring.measureText(text).width);
  }
  return widths.get(key);
}

const short = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

export class GraphView {
  constructor() {
    this.layouter = new Layouter();
    this.numbering = new Numbering();
    this.colourBy = "device";
    this.selected = null;
    this.marked = new Set();
    this.view = { x: 0, y: 0, scale: 1 };
    this.layoutNumber = 0;
    Object.assign(this, NOTHING);
    this.build();
    darkMode.addEventListener("change", () => this.model && this.draw());
  }

  build() {
    const button = (label, title, act) => h("button", { type: "button", title, "aria-label": title, onclick: act }, label);
    this.search = h("input", { type: "search", placeholder: "Search ops, values, lines  ( / )", "aria-label": "Search the graph", oninput: () => this.find() });
    this.found = h("span", { class: "found", role: "status" });
    this.choice = h("select", { "aria-label": "Colour boxes by", onchange: () => { this.colourBy = this.choice.value; this.draw(); } },
      h("option", { value: "device" }, "Colour: device"), h("option", { value: "task" }, "Colour: task"), h("option", { value: "time" }, "Colour: measured time"));
    this.legend = h("div", { class: "graph-legend" });
    this.notes = h("div", { class: "graph-notes" });
    this.world = s("g");
    this.svg = s("svg", { class: "graph-svg", tabindex: "0", role: "application", "aria-label": "Graph. Arrow keys select a box, Enter opens or closes a group, plus and minus zoom, 0 fits." },
      s("defs", {}, ...["", "-order", "-lit"].map((kind) => s("marker", { id: `tip${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerUnits: "userSpaceOnUse", markerWidth: 9, markerHeight: 9, orient: "auto-start-reverse" },
        s("path", { d: "M0,0 L8,4 L0,8 z", class: `tip${kind}` })))), this.world);
    this.panel = h("aside", { class: "graph-panel", "aria-label": "About the selection", "aria-live": "polite" });
    this.canvas = h("div", { class: "graph-canvas" }, this.svg,
      h("div", { class: "graph-zoom" }, button("+", "Zoom in", () => this.zoom(1.3)), button("−", "Zoom out", () => this.zoom(1 / 1.3)), button("⤢", "Fit the graph", () => this.fit())));
    this.element = h("div", { class: "graph" },
      h("div", { class: "graph-bar" }, this.search, this.found, h("span", { class: "spring" }), this.choice,
        button("Fold all", "Fold all groups", () => this.foldAll())),
      this.notes, this.legend, h("div", { class: "graph-body" }, this.canvas, this.panel));
    this.listen();
  }

  listen() {
    let drag = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, y: event.clientY, from: { ...this.view }, moved: false };
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      if (!drag.moved) this.svg.setPointerCapture(event.pointerId);
      drag.moved = true;
      this.view = { ...drag.from, x: drag.from.x + dx, y: drag.from.y + dy };
      this.place();
    });
    this.svg.addEventListener("pointerup", () => { this.dragged = drag?.moved; drag = null; });
    this.svg.addEventListener("pointercancel", () => { drag = null; });
    // The wheel scrolls the page until the graph has the focus, so that it does not catch the wheel of a long page.
    this.svg.addEventListener("wheel", (event) => {
      if (document.activeElement !== this.svg && !event.ctrlKey) return;
      event.preventDefault();
      const at = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0018)), event.clientX - at.left, event.clientY - at.top);
    }, { passive: false });
    this.svg.addEventListener("click", (event) => {
      if (this.dragged) return;
      const id = event.target.closest?.("[data-id]")?.dataset.id;
      if (event.target.closest?.(".fold")) this.toggle(Number(id));
      else this.select(id === undefined ? null : Number(id));
    });
    this.svg.addEventListener("dblclick", (event) => {
      const id = event.target.closest?.("[data-id]")?.dataset.id;
      if (id !== undefined && !event.target.closest(".fold")) this.toggle(Number(id));
    });
    this.svg.addEventListener("keydown", (event) => this.onkey(event));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "/" && event.target !== this.search) {
        event.preventDefault();
        this.search.focus();
      } else if (event.target === this.search && event.key === "Enter") this.showFound(1);
    });
    new ResizeObserver(() => !this.touched && this.fit()).observe(this.canvas);
  }

  onkey(event) {
    const steps = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    if (steps[event.key]) this.step(...steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.selected !== null && this.toggle(this.selected);
    else if (event.key === "+" || event.key === "=") this.zoom(1.3);
    else if (event.key === "-") this.zoom(1 / 1.3);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  /** Select the nearest box in a direction. */
  step(dx, dy) {
    const all = [...this.layout.boxes, ...this.layout.groups];
    const from = all.find(({ id }) => id === this.selected);
    let best = from ? null : this.layout.boxes[0];
    let least = Infinity;
    for (const box of from ? all : []) {
      const ahead = (box.x - from.x) * dx + (box.y - from.y) * dy;
      const aside = Math.abs((box.x - from.x) * dy) + Math.abs((box.y - from.y) * dx);
      if (ahead > 1 && ahead + 2 * aside < least) [best, least] = [box, ahead + 2 * aside];
    }
    if (best) this.select(best.id, true);
  }

  /** Show a graph; `items` are measured times of plan items, as in api/timeline. */
  async show(data, items = []) {
    this.model = new GraphModel(data);
    this.selected = null;
    this.marked = new Set();
    this.search.value = "";
    this.found.textContent = "";
    this.touched = false;
    this.layoutNumber++; // nothing of an earlier graph is drawn any more
    Object.assign(this, NOTHING);
    this.world.replaceChildren();
    this.element.removeAttribute("aria-busy");
    this.attach(items);
    this.notes.replaceChildren(...(data.notes ?? []).map((note) => h("p", {}, note)));
    if (!data.nodes.length) {
      this.panel.replaceChildren(emptyState("An empty graph", "The function has no ops."));
      return;
    }
    await this.relayout();
    this.fit();
  }

  attach(items) {
    this.model.measure(items);
    this.timed = items.length > 0;
    this.choice.options[2].hidden = !this.timed;
  }

  /** Show other measured times, in place of those that `show` got. */
  async measure(items) {
    const wasTimed = this.timed;
    this.attach(items);
    if (!this.model.nodes.length || (!wasTimed && !this.timed)) return;
    // A time is in its box, which it makes wider: also a layout that is under way has been asked for without it.
    await this.relayout(this.selected);
    if (!this.touched) this.fit();
  }

  lines(node) {
    const variables = [...new Set([...node.writes, ...node.reads])].map((index) => this.model.data.variables[index].name);
    const values = (node.gives ?? []).map((index) => this.model.data.values[index]);
    const parts = [{ text: short(this.model.titleOf(node), 34), kind: "title" }];
    if (node.us) parts[0].badge = microseconds(node.us);
    if (node.isGroup) parts.push({ text: counted(node.ops - (node.kind === "function" ? 1 : 0), "op"), kind: "detail" });
    else if (variables.length) parts.push({ text: short(variables.join(", "), 34), kind: "state" });
    else if (values.length && node.kind !== "input") parts.push({ text: short(values.map((value) => (/^%\d+$/.test(value.name) ? value.type : `${value.name.slice(1)}: ${value.type}`)).join(", "), 34), kind: "detail" });
    else if (node.kind === "input") parts.push({ text: values[0].type, kind: "detail" });
    return parts;
  }

  size(node) {
    const lines = this.lines(node);
    const wide = Math.max(...lines.map((line) => textWidth(line.text, line.kind === "title") + (line.badge ? textWidth(line.badge) + 16 : 0)));
    return { lines, width: Math.ceil(wide) + (node.isGroup ? 44 : 24), height: 10 + 16 * lines.length };
  }

  async relayout(keep = null) {
    const before = keep === null ? null : this.screenPlace(keep);
    const { boxes, groups } = this.model.visible();
    const sizes = new Map(boxes.map((id) => [id, this.size(this.model.nodes[id])]));
    const all = this.model.edges();
    const takers = new Map();
    for (const edge of all) takers.set(edge.source, (takers.get(edge.source) ?? 0) + 1);
    // That a write comes after a read is drawn for a selected box alone: each update would have such an edge.
    const isFar = ({ source, values }) => takers.get(source) > MOST_TAKERS || (!values.size && !this.model.nodes[source].acts);
    const far = all.filter(isFar);
    const edges = all.filter((edge) => !isFar(edge));
    const labelled = edges.length <= MOST_LABELS;
    for (const edge of edges) edge.label = labelled && edge.bytes >= 1 ? bytes(edge.bytes) : "";
    const asked = {
      boxes: boxes.map((id) => ({ id, parent: this.model.nodes[id].parent, width: sizes.get(id).width, height: sizes.get(id).height })),
      groups: groups.map((id) => ({ id, parent: this.model.nodes[id].parent, width: textWidth(this.model.nodes[id].title, true) + 60 })),
      edges: edges.map(({ source, target, label }) => ({ source, target, width: label ? textWidth(label) + 8 : 0 })),
    };
    const number = ++this.layoutNumber;
    this.element.setAttribute("aria-busy", "true");
    const layout = await this.layouter.layout(asked);
    if (number !== this.layoutNumber) return;
    this.element.removeAttribute("aria-busy");
    Object.assign(this, { layout, sizes, edges, far }); // together, as what is selected meanwhile is drawn by them
    this.draw();
    const after = before && this.screenPlace(keep);
    if (after) {
      this.view.x += before.x - after.x;
      this.view.y += before.y - after.y;
      this.place();
    }
  }

  screenPlace(id) {
    const box = [...this.layout.boxes, ...this.layout.groups].find((one) => one.id === id);
    if (!box) return null;
    return { x: this.view.x + box.x * this.view.scale, y: this.view.y + (box.y - box.height / 2) * this.view.scale };
  }

  /** The colour of a box, as CSS: its device's or task's, or a shade for its share of the longest time. */
  tint(node) {
    if (this.colourBy === "time") {
      const share = this.longestUs ? Math.sqrt(node.us / this.longestUs) : 0;
      return share ? `color-mix(in oklab, var(--box), ${colour(1)} ${(8 + 60 * share).toFixed(0)}%)` : "var(--box)";
    }
    const places = new Set([...node.devices.keys()].filter((device) => device).map((device) => (this.colourBy === "task" ? device.split("/")[0] : device)));
    if (places.size !== 1) return "var(--box)";
    return `color-mix(in oklab, var(--box), ${colour(this.numbering.of([...places][0]))} 24%)`;
  }

  drawLegend() {
    const places = new Map();
    for (const id of this.model.roots) {
      for (const [device, count] of this.model.nodes[id].devices) {
        const place = this.colourBy === "task" ? device.split("/")[0] : device;
        places.set(place, (places.get(place) ?? 0) + count);
      }
    }
    const named = [...places.keys()].filter(Boolean).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    named.forEach((place) => this.numbering.of(place));
    const items = this.colourBy === "time"
      ? [h("span", {}, `Darker boxes took more of a step, at most ${microseconds(this.longestUs)}`)]
      : named.map((place) => h("span", {}, h("i", { style: `background:color-mix(in oklab, var(--box), ${colour(this.numbering.of(place))} 45%)` }), `${place} · ${counted(places.get(place), "op")}`));
    if (this.colourBy !== "time" && places.get("") && named.length) items.push(h("span", {}, h("i", { style: "background:var(--box)" }), `the caller · ${counted(places.get(""), "op")}`));
    if (this.model.nodes.some((node) => node.acts)) items.push(h("span", {}, h("i", { class: "acts" }), "writes state"));
    if (this.edges.some((edge) => !edge.values.size)) items.push(h("span", {}, h("i", { class: "order" }), "order after a write"));
    this.legend.replaceChildren(...items);
  }

  draw() {
    const shown = this.layout.boxes.map(({ id }) => this.model.nodes[id]);
    this.longestUs = Math.max(0, ...shown.map((node) => node.us));
    this.drawLegend();
    const far = this.selected === null ? [] : this.far.filter((edge) => edge.source === this.selected || edge.target === this.selected);
    this.world.replaceChildren(
      ...this.layout.groups.map((box) => this.drawnGroup(box)),
      ...this.layout.edges.map((line, index) => this.drawnEdge(line, this.edges[index])),
      ...far.map((edge) => this.drawnFar(edge)),
      ...this.layout.boxes.map((box) => this.drawnBox(box)));
    this.about();
  }

  state(id) {
    if (this.marked.size && !this.isMarked(id)) return " dim";
    return this.marked.size ? " marked" : "";
  }

  /** Whether a box is one of the marked nodes, or holds one. */
  isMarked(id) {
    return this.marked.has(id) || this.markedBoxes.has(id);
  }

  mark(ids) {
    this.marked = new Set(ids);
    this.markedBoxes = new Set(ids.flatMap((id) => [id, ...this.model.nodes[id].path]));
    this.draw();
  }

  drawnGroup({ id, x, y, width, height }) {
    const node = this.model.nodes[id];
    const [left, top] = [x - width / 2 - 2, y - height / 2 - HEADER + 6];
    const title = short(this.model.titleOf(node), Math.max(8, Math.floor((width - 40) / 7)));
    return s("g", { class: `group-open${this.selected === id ? " selected" : ""}`, "data-id": id },
      s("title", {}, node.title),
      s("rect", { x: left, y: top, width: width + 4, height: height + HEADER - 4, rx: 8, style: `fill:${this.colourBy === "time" ? "var(--box)" : this.tint(node)}` }),
      s("g", { class: "fold", transform: `translate(${left + 8},${top + 6})` }, s("rect", { width: 14, height: 14, rx: 3 }), s("path", { d: "M3.5,7 h7" })),
      s("text", { x: left + 28, y: top + 17, class: "title" }, title));
  }

  drawnBox({ id, x, y, width, height }) {
    const node = this.model.nodes[id];
    const [left, top] = [x - width / 2, y - height / 2];
    const round = node.kind === "input" || node.kind === "output" ? height / 2 : node.op === "var.read" ? 12 : 6;
    const parts = [
      s("title", {}, [node.title, this.model.lineOf(node)?.short].filter(Boolean).join("\n")),
      s("rect", { x: left, y: top, width, height, rx: round, style: `fill:${this.tint(node)}`, class: "shape" })];
    if (node.isGroup) {
      parts.unshift(s("rect", { x: left + 3, y: top + 3, width, height, rx: 6, class: "stack" }));
      parts.push(s("g", { class: "fold", transform: `translate(${left + width - 21},${y - 7})` }, s("rect", { width: 14, height: 14, rx: 3 }), s("path", { d: "M3.5,7 h7 M7,3.5 v7" })));
    }
    if (node.acts) parts.push(s("rect", { x: left, y: top + 4, width: 3.5, height: height - 8, rx: 1.5, class: "acts" }));
    const middle = node.isGroup ? x - 8 : x;
    this.sizes.get(id).lines.forEach((line, index) => {
      const badge = line.badge ? textWidth(line.badge) + 12 : 0;
      parts.push(s("text", { x: middle - badge / 2, y: top + 16 + 16 * index + (this.sizes.get(id).lines.length === 1 ? 1 : 0), class: line.kind, "text-anchor": "middle" }, line.text));
      if (badge) {
        const from = middle - badge / 2 + textWidth(line.text, true) / 2 + 6;
        parts.push(s("rect", { x: from, y: top + 4.5, width: badge - 2, height: 15, rx: 7.5, class: "badge" }));
        parts.push(s("text", { x: from + badge / 2 - 1, y: top + 16, class: "badge-text", "text-anchor": "middle" }, line.badge));
      }
    });
    return s("g", { class: `box ${node.kind}${this.selected === id ? " selected" : ""}${this.state(id)}`, "data-id": id }, ...parts);
  }

  drawnEdge({ points, x, y }, edge) {
    const lit = this.selected !== null && (edge.source === this.selected || edge.target === this.selected);
    const kind = edge.values.size ? "" : " order";
    const values = [...edge.values].slice(0, 12).map((index) => this.model.data.values[index]).map(({ name, type, size_bytes }) => `${name}: ${type}, ${bytes(size_bytes)}`);
    if (edge.values.size > 12) values.push(`and ${edge.values.size - 12} more`);
    const width = edge.values.size ? Math.min(5, 1.2 + Math.max(0, Math.log10(edge.bytes / 1000 || 1)) * 0.7) : 1.2;
    const tip = lit ? "-lit" : kind ? "-order" : "";
    const parts = [s("title", {}, values.join("\n") || "The order of reads and writes of one variable"),
      s("path", { d: smooth(points), style: `stroke-width:${width.toFixed(1)}`, "marker-end": `url(#tip${tip})` })];
    if (edge.label) parts.push(s("text", { x, y: y + 4, "text-anchor": "middle" }, edge.label));
    return s("g", { class: `edge${kind}${lit ? " lit" : ""}` }, ...parts);
  }

  drawnFar({ source, target }) {
    const at = (id) => this.layout.boxes.find((box) => box.id === id);
    const [from, to] = [at(source), at(target)];
    if (!from || !to) return s("g");
    const [a, b] = [from.y + from.height / 2, to.y - to.height / 2];
    return s("g", { class: "edge lit" }, s("path", { d: `M${from.x},${a} C${from.x},${a + 60} ${to.x},${b - 60} ${to.x},${b}`, "marker-end": "url(#tip-lit)" }));
  }

  about() {
    const acts = {
      select: (id) => this.goTo(id),
      toggle: (id) => this.toggle(id),
      mark: (ids) => this.mark(ids),
    };
    this.panel.replaceChildren(this.selected === null ? aboutGraph(this.model, acts, this.marked) : aboutNode(this.model, this.selected, acts));
  }

  select(id, into = false) {
    this.selected = id;
    if (id === null) this.marked = new Set();
    this.draw();
    if (into) this.scrollTo(id);
  }

  async toggle(id) {
    if (!this.model.nodes[id].isGroup) return;
    this.touched = true;
    this.model.toggle(id);
    await this.relayout(id);
    this.select(id);
  }

  async foldAll() {
    this.model.open.clear();
    this.selected = null;
    await this.relayout();
    this.fit();
  }

  /** Open the groups around a node, select it, and move it into view. */
  async goTo(id) {
    this.model.reveal(id);
    this.selected = id;
    this.touched = true;
    await this.relayout();
    this.scrollTo(id);
  }

  scrollTo(id) {
    const box = [...this.layout.boxes, ...this.layout.groups].find((one) => one.id === id);
    if (!box) return;
    const { width, height } = this.canvas.getBoundingClientRect();
    const { scale } = this.view;
    const [x, y] = [this.view.x + box.x * scale, this.view.y + box.y * scale];
    if (x > 60 && x < width - 60 && y > 30 && y < height - 30) return;
    this.view = { scale, x: width / 2 - box.x * scale, y: height / 2 - box.y * scale };
    this.place();
  }

  find() {
    const ids = this.model.search(this.search.value);
    this.hits = ids.filter((id) => this.model.nodes[id].kind !== "run").slice(0, 10_000);
    this.hit = -1;
    this.found.textContent = this.search.value ? (ids.length ? `${counted(ids.length, "match").replace("matchs", "matches")}, Enter shows the next` : "no match") : "";
    this.selected = null;
    this.mark(ids.slice(0, 10_000));
  }

  async showFound(by) {
    if (!this.hits?.length) return;
    this.hit = (this.hit + by + this.hits.length) % Math.min(this.hits.length, MOST_FOUND);
    const marked = this.hits;
    await this.goTo(this.hits[this.hit]);
    this.mark(marked);
    this.found.textContent = `${this.hit + 1} of ${this.hits.length}`;
  }

  fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (!width) return;
    const most = Math.min(width / (this.layout.width + 24), height / (this.layout.height + HEADER + 24));
    const scale = Math.max(0.6, Math.min(1.15, most));
    const y = most < scale ? HEADER : (height - this.layout.height * scale) / 2;
    this.view = { scale, x: (width - this.layout.width * scale) / 2, y: Math.max(HEADER, y) };
    this.place();
  }

  zoom(by, x, y) {
    const { width, height } = this.canvas.getBoundingClientRect();
    const [atX, atY] = [x ?? width / 2, y ?? height / 2];
    const scale = Math.max(0.05, Math.min(4, this.view.scale * by));
    const ratio = scale / this.view.scale;
    this.touched = true;
    this.view = { scale, x: atX - (atX - this.view.x) * ratio, y: atY - (atY - this.view.y) * ratio };
    this.place();
  }

  place() {
    this.world.setAttribute("transform", `translate(${this.view.x.toFixed(2)},${this.view.y.toFixed(2)}) scale(${this.view.scale.toFixed(4)})`);
  }
}

/** A smooth path through the points of an edge. */
function smooth(points) {
  const [first, ...rest] = points;
  let path = `M${first.x.toFixed(1)},${first.y.toFixed(1)}`;
  if (rest.length === 1) return `${path} L${rest[0].x.toFixed(1)},${rest[0].y.toFixed(1)}`;
  for (let index = 0; index < rest.length - 1; index++) {
    const [at, next] = [rest[index], rest[index + 1]];
    const end = index === rest.length - 2 ? next : { x: (at.x + next.x) / 2, y: (at.y + next.y) / 2 };
    path += ` Q${at.x.toFixed(1)},${at.y.toFixed(1)} ${end.x.toFixed(1)},${end.y.toFixed(1)}`;
  }
  return path;
}
