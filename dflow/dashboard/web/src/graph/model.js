// The tree of groups of a graph, which of them are open, and the edges between the boxes that are visible.

const INITIAL_BOXES = 28;
/** Items of a plan whose time is no work: a receive waits, and a send lasts until its values are computed. */
const WAITING = new Set(["Recv", "Send", "UseResource"]);

export class GraphModel {
  constructor(data) {
    this.data = data;
    this.nodes = data.nodes.map((node, id) => ({ ...node, id, parent: node.within ?? null, children: [] }));
    this.roots = [];
    for (const node of this.nodes) (node.parent === null ? this.roots : this.nodes[node.parent].children).push(node.id);
    for (const id of this.roots) this.summarize(id, []);
    this.open = new Set();
    this.openSome();
  }

  /** Fill in what a group has from its children: ops, device, effects, variables. */
  summarize(id, path) {
    const node = this.nodes[id];
    node.path = path;
    node.isGroup = node.children.length > 0;
    node.line = node.line ?? null;
    if (node.kind === "line") node.title = this.lineOf(node).short;
    node.ops = node.kind === "op" || node.kind === "function" ? 1 : 0;
    node.devices = new Map(node.ops ? [[node.device ?? "", 1]] : []);
    node.reads ??= [];
    node.writes ??= [];
    for (const childId of node.children) {
      const child = this.summarize(childId, [...path, id]);
      node.ops += child.ops;
      for (const [device, count] of child.devices) node.devices.set(device, (node.devices.get(device) ?? 0) + count);
      node.acts ||= child.acts;
      if (node.kind !== "function") {
        node.reads = [...new Set([...node.reads, ...child.reads])];
        node.writes = [...new Set([...node.writes, ...child.writes])];
      }
    }
    return node;
  }

  lineOf(node) {
    return node.line === null ? null : this.data.lines[node.line];
  }

  /** What a box is called: the op without its family. */
  titleOf(node) {
    return node.title.replace(/^var\./, "") || "ops";
  }

  openSome() {
    let shown = this.roots.length;
    const waiting = [...this.roots];
    while (waiting.length) {
      const node = this.nodes[waiting.shift()];
      if (node.kind !== "scope" || node.folded || shown + node.children.length > INITIAL_BOXES) continue;
      this.open.add(node.id);
      shown += node.children.length;
      waiting.push(...node.children);
    }
  }

  toggle(id) {
    if (!this.open.delete(id)) this.open.add(id);
  }

  /** Open the groups around a node. */
  reveal(id) {
    for (const group of this.nodes[id].path) this.open.add(group);
  }

  /** The node's box: itself, or the outermost closed group around it. */
  boxOf(id) {
    return this.nodes[id].path.find((group) => !this.open.has(group)) ?? id;
  }

  /** Visible boxes, closed groups among them, and the open groups around them, outermost first. */
  visible() {
    const boxes = [];
    const groups = [];
    const visit = (id) => {
      if (!this.open.has(id) || !this.nodes[id].isGroup) {
        boxes.push(id);
        return;
      }
      groups.push(id);
      this.nodes[id].children.forEach(visit);
    };
    this.roots.forEach(visit);
    return { boxes, groups };
  }

  /** Edges between visible boxes, joined: {source, target, values, bytes}; without values only the order matters. */
  edges() {
    const found = new Map();
    for (const [source, target, value] of this.data.edges) {
      const [from, to] = [this.boxOf(source), this.boxOf(target)];
      if (from === to || this.isOpenGroup(from) || this.isOpenGroup(to)) continue;
      const key = `${from} ${to}`;
      if (!found.has(key)) found.set(key, { source: from, target: to, values: new Set() });
      if (value !== null) found.get(key).values.add(value);
    }
    const all = [...found.values()];
    for (const edge of all) edge.bytes = [...edge.values].reduce((sum, value) => sum + this.data.values[value].size_bytes, 0);
    return all;
  }

  isOpenGroup(id) {
    return this.nodes[id].isGroup && this.open.has(id);
  }

  /** Ids of the nodes that match all words of a text, in their title, values, line, device, scopes or variables. */
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    return this.nodes.filter((node) => {
      node.words ??= this.wordsOf(node);
      return words.every((word) => node.words.includes(word));
    }).map((node) => node.id);
  }

  wordsOf(node) {
    const variables = node.isGroup ? [] : [...node.reads, ...node.writes].map((index) => this.data.variables[index].name);
    const values = (node.gives ?? []).map((index) => this.data.values[index].name);
    return [node.title, node.op, node.device, this.lineOf(node)?.short, ...values, ...variables].filter(Boolean).join(" ").toLowerCase();
  }

  /** Attach measured times: each item of a plan to the first node of its source line, as one program has many ops. */
  measure(items) {
    const firsts = new Map();
    for (const node of this.nodes) {
      const line = node.ops === 1 && !node.isGroup ? this.lineOf(node) : null;
      for (const name of line ? [line.at, line.short] : []) if (!firsts.has(name)) firsts.set(name, node);
      node.us = 0;
      node.items = [];
    }
    for (const item of items) {
      const node = firsts.get(item.line);
      if (!node) continue;
      for (const one of [node, ...node.path.map((id) => this.nodes[id])]) {
        if (!WAITING.has(item.kind)) one.us += item.mean_us;
        one.items.push(item);
      }
    }
  }
}
