// The panel beside a graph: about the selected box, or about the graph when none is selected.
import { h } from "../dom.js";
import { bytes, counted, microseconds } from "../format.js";

const KINDS = { scope: "name scope", function: "function", line: "ops of one line", run: "consecutive ops", input: "argument", output: "result" };

const link = (text, act, title) => h("button", { type: "button", class: "link", title, onclick: act }, text);

function section(title, ...rows) {
  return rows.length ? h("section", {}, h("h4", {}, title), ...rows) : null;
}

function limited(rows, most = 30) {
  return rows.length <= most ? rows : [...rows.slice(0, most), h("p", { class: "faint" }, `and ${rows.length - most} more`)];
}

export function aboutGraph(model, acts, marked) {
  const { title, ops, variables } = model.data;
  const users = (index) => model.nodes.filter((node) => !node.isGroup && (node.reads.includes(index) || node.writes.includes(index))).map((node) => node.id);
  const rows = variables.map((variable, index) => h("div", { class: "row" },
    link(variable.name, () => acts.mark(users(index)), "Mark the ops that use it"),
    h("span", { class: "faint" }, [variable.type, bytes(variable.size_bytes), variable.device].filter(Boolean).join(" · "))));
  return h("div", {},
    h("h3", {}, title || "Graph"),
    h("p", { class: "faint" }, `${counted(ops, "op")}, ${counted(variables.length, "variable")}`),
    marked.size ? h("p", {}, `${counted(marked.size, "node")} marked. Click the background to unmark.`) : null,
    section("Variables", ...limited(rows, 60)),
    h("p", { class: "hint" }, "Click a box to see its line. ⊞ or a double click opens a group. Drag to move; click, then turn the wheel to zoom."));
}

export function aboutNode(model, id, acts) {
  const { data } = model;
  const node = model.nodes[id];
  const line = model.lineOf(node);
  const inside = (other) => other === id || model.nodes[other].path.includes(id);
  const ends = { from: new Map(), to: new Map() };
  for (const [source, target, value] of data.edges) {
    if (value === null || inside(source) === inside(target)) continue;
    const [side, other] = inside(target) ? ["from", source] : ["to", target];
    ends[side].set(`${value} ${other}`, [value, other]);
  }
  const valueRow = ([value, other]) => {
    const { name, type, size_bytes } = data.values[value];
    return h("div", { class: "row" }, link(model.titleOf(model.nodes[other]), () => acts.select(other), "Go there"),
      h("span", { class: "faint" }, [name, type, bytes(size_bytes)].join(" · ")));
  };
  const stateRow = (verb) => (index) => {
    const { name, type, device } = data.variables[index];
    return h("div", { class: "row" }, h("span", {}, h("em", { class: verb }, verb), ` ${name}`), h("span", { class: "faint" }, [type, device].filter(Boolean).join(" · ")));
  };
  const devices = [...node.devices.keys()].filter(Boolean);
  const itemRow = (item) => h("div", { class: "row" }, h("span", {}, `${microseconds(item.mean_us)} ${item.kind}: ${item.name}`),
    h("span", { class: "faint" }, `${item.task} · ${item.line.split("/").pop()}`));
  const items = [...node.items].sort((a, b) => b.mean_us - a.mean_us);
  return h("div", {},
    h("nav", { class: "crumbs" }, ...node.path.map((group) => [link(model.titleOf(model.nodes[group]), () => acts.select(group)), " › "]).flat(), h("span", {}, KINDS[node.kind] ?? node.op)),
    h("h3", {}, model.titleOf(node)),
    node.isGroup ? h("p", {}, h("button", { type: "button", onclick: () => acts.toggle(id) }, model.open.has(id) ? "Fold" : `Open ${counted(node.children.length, "box").replace("boxs", "boxes")}`)) : null,
    line ? h("div", { class: "source" }, h("code", {}, line.text || "…"), h("span", { class: "faint", title: line.at }, line.short)) : null,
    devices.length ? h("p", { class: "faint" }, `on ${devices.slice(0, 6).join(", ")}`) : null,
    node.about ? h("p", { class: "faint attributes" }, node.about) : null,
    section("Gives", ...limited((node.gives ?? []).map((value) => h("div", { class: "row" }, h("span", {}, data.values[value].name), h("span", { class: "faint" }, `${data.values[value].type} · ${bytes(data.values[value].size_bytes)}`))))),
    section("State", ...limited([...node.reads.map(stateRow("reads")), ...node.writes.map(stateRow("writes"))])),
    section("From", ...limited([...ends.from.values()].map(valueRow))),
    section("To", ...limited([...ends.to.values()].map(valueRow))),
    items.length ? section("Measured, mean of a step", ...limited(items.map(itemRow), 10), h("p", { class: "hint" }, "A program counts at the first op of its source line; times of Recv and Send are waits, and not in the box.")) : null);
}
