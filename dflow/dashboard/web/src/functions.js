// The functions that tasks have compiled, and why each was traced again.
import { emptyState, h, Table } from "./dom.js";
import { counted, microseconds } from "./format.js";
import { ask } from "./stream.js";

export class Functions {
  constructor(page) {
    this.title = "Functions";
    this.page = page;
    this.isEmpty = true;
    const milliseconds = (ms) => microseconds(ms === null || ms === undefined ? null : 1000 * ms);
    this.table = new Table([
      { label: "Function", sort: (row) => row.name, cell: (row) => ({ text: row.name, class: "strong" }) },
      { label: "Task", sort: (row) => row.task, cell: (row) => ({ text: row.task }) },
      { label: "Line", cell: (row) => ({ text: row.line ?? "", class: "code" }) },
      { label: "Traces", number: true, sort: (row) => row.traces, cell: (row) => ({ text: String(row.traces), class: row.traces > 3 ? "many" : "" }) },
      { label: "Newest trace because of", cell: (row) => ({ text: (row.last_changes ?? []).join(", "), class: "code" }) },
      { label: "Time in all", number: true, sort: (row) => row.total_ms, cell: (row) => ({ text: milliseconds(row.total_ms) }) },
    ], { caption: "Functions", keyOf: (row) => `${row.task} ${row.id}`, onpick: (row) => { location.hash = `functions?${new URLSearchParams({ task: row.task, id: row.id })}`; } });
    this.missing = h("p", { class: "faint more" });
    this.records = h("div", { "aria-live": "polite" });
    this.place = h("div", {}, emptyState("No functions yet", "Functions under dflow.jit appear here when a task has called them."));
    this.milliseconds = milliseconds;
    this.element = h("div", {}, h("section", { class: "card" }, h("h2", {}, "Compiled functions"), this.place, this.missing), this.records);
  }

  async open(parameters) {
    const asked = (this.asked = {});
    try {
      const { tasks, missing } = await ask("api/functions");
      if (asked !== this.asked) return; // another function was chosen meanwhile
      const rows = tasks.flatMap(({ task, functions }) => functions.map((one) => ({ ...one, task })));
      this.isEmpty = !rows.length;
      if (rows.length) this.place.replaceChildren(this.table.element);
      this.table.update(rows);
      this.missing.textContent = Object.entries(missing ?? {}).map(([task, why]) => `${task}: ${why}.`).join(" ");
      const found = parameters.get("task") && (await ask(`api/traces?${parameters}`));
      if (asked !== this.asked) return;
      if (found) this.showRecords(found);
      else this.records.replaceChildren();
    } catch (error) {
      if (asked === this.asked) this.missing.textContent = error.message;
    }
  }

  showRecords({ task, id, name, records, left_out }) {
    const newestFirst = [...records].sort((a, b) => b.number - a.number);
    const graph = (number) => `#graph?${new URLSearchParams({ task, id, trace: number })}`;
    this.records.replaceChildren(h("section", { class: "card" },
      h("h2", {}, `Why ${name} was traced`, h("span", { class: "faint" }, task)),
      h("ol", { class: "records" }, ...newestFirst.map((record) => h("li", {},
        h("div", { class: "record-head" }, h("b", {}, `Trace ${record.number}`), h("span", { class: "code" }, record.call ?? ""), h("span", { class: "spring" }),
          h("span", { class: "faint" }, `traced in ${this.milliseconds(record.trace_ms)}${record.total_ms ? `, ${this.milliseconds(record.total_ms)} with compilation` : ""}`),
          record.has_graph ? h("a", { href: graph(record.number) }, "graph") : null),
        ...record.changes.map((change) => h("p", { class: "code change" }, change)),
        ...(record.captured ?? []).map((captured) => h("p", { class: "faint" }, `closed over ${captured}, which became an input`)),
        Object.keys(record.arguments).length ? h("details", {}, h("summary", {}, counted(Object.keys(record.arguments).length, "argument")),
          ...Object.entries(record.arguments).map(([argument, type]) => h("p", { class: "code" }, `${argument}: ${type}`))) : null))),
      left_out ? h("p", { class: "faint more" }, `${counted(left_out, "older trace")} are not kept.`) : null));
  }
}
