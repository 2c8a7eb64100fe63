// Elements of HTML and SVG, and a table that is updated in place.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, properties, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function s(tag, properties, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** An empty state: what is missing, and how to get it. */
export function emptyState(title, text) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, text));
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * A table whose rows are updated in place, so that focus, selection and scrolling stay.
 * columns: [{name, label, number, cell(row) -> {text, title, class, bar, node}, sort(row)}]
 */
export class Table {
  constructor(columns, { caption, keyOf, onpick } = {}) {
    Object.assign(this, { columns, keyOf, onpick, rows: new Map(), order: null });
    this.heads = columns.map((column, index) =>
      h("th", { scope: "col", class: column.number ? "number" : null },
        column.sort ? h("button", { type: "button", onclick: () => this.sortBy(index) }, column.label) : column.label));
    this.body = h("tbody");
    this.element = h("div", { class: "scroll" }, h("table", {},
      h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, ...this.heads)), this.body));
  }

  sortBy(index) {
    const down = this.order?.index === index ? !this.order.down : true;
    this.order = this.order?.index === index && !this.order.down ? null : { index, down };
    this.heads.forEach((head, at) => {
      if (this.order?.index === at) head.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.update(this.shown ?? []);
  }

  sorted(rows) {
    if (!this.order) return rows;
    const of = this.columns[this.order.index].sort;
    const sign = this.order.down ? -1 : 1;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    return [...rows].sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === null || x === undefined) return 1;
      return y === null || y === undefined ? -1 : sign * compare(x, y);
    });
  }

  update(rows) {
    this.shown = rows;
    const found = new Map();
    let place = this.body.firstElementChild;
    for (const row of this.sorted(rows)) {
      const key = this.keyOf(row);
      const line = this.rows.get(key) ?? this.newRow(key);
      line.row = row;
      this.columns.forEach((column, index) => this.fill(line.cells[index], column.cell(row)));
      found.set(key, line);
      if (line.element === place) place = place.nextElementSibling;
      else this.body.insertBefore(line.element, place);
    }
    for (const [key, line] of this.rows) if (!found.has(key)) line.element.remove();
    this.rows = found;
  }

  newRow(key) {
    const line = { cells: this.columns.map((column) => h("td", { "data-label": column.label, class: column.number ? "number" : null })) };
    line.element = h("tr", { "data-key": key }, ...line.cells);
    if (this.onpick) {
      line.element.tabIndex = 0;
      line.element.classList.add("pickable");
      line.element.addEventListener("click", () => this.onpick(line.row, line.element));
      line.element.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target === line.element) this.onpick(line.row, line.element);
      });
    }
    return line;
  }

  fill(cell, { text = "", title, class: kind, bar, node }) {
    const seen = `${text}\0${title ?? ""}\0${kind ?? ""}\0${bar ?? ""}`;
    if (cell.seen === seen && !node) return;
    cell.seen = seen;
    const parts = node ? [node] : [h("span", { class: kind, title }, text)];
    if (bar !== undefined && bar !== null) {
      parts.push(h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: `width:${Math.min(100, 100 * bar).toFixed(1)}%` })));
    }
    cell.replaceChildren(...parts);
    cell.classList.toggle("blank", !node && text === "");
  }
}
