// The graph of a function of a task.
import { emptyState, h } from "./dom.js";
import { ask } from "./stream.js";
import { GraphView } from "./graph/view.js";

export class GraphTab {
  constructor(page) {
    this.title = "Graph";
    this.page = page;
    this.view = new GraphView();
    this.items = [];
    this.isEmpty = true;
    this.choice = h("select", { "aria-label": "Function", onchange: () => { location.hash = this.choice.value; } });
    this.place = h("div", { class: "graph-place" }, emptyState("No graph yet", "A function's graph appears here when a task has called it."));
    this.element = h("div", { class: "graph-tab" }, h("div", { class: "tools" }, h("label", {}, "Function ", this.choice)), this.place);
  }

  restart() {
    this.shown = undefined;
  }

  async open(parameters) {
    const task = parameters.get("task");
    const asked = (this.asked = {});
    const wanted = task ? `graph?${parameters}` : this.shown;
    try {
      const { tasks } = await ask("api/functions");
      if (asked !== this.asked) return;
      this.isEmpty = !tasks.some(({ functions }) => functions.some((one) => one.has_graph));
      this.callers = new Set(tasks.map(({ task: caller }) => caller));
      this.offer(tasks);
      const first = wanted ?? this.first;
      if (first === undefined) return;
      this.choice.value = first;
      if (first !== this.shown) await this.show(first);
    } catch (error) {
      if (asked === this.asked) this.fail(error);
    }
  }

  fail(error) {
    this.place.replaceChildren(emptyState("The graph could not be shown", error.message));
    this.shown = undefined;
  }

  /** Offer all functions. The first one shown is that with the most time: usually the training step. */
  offer(tasks) {
    this.first = undefined;
    let longest = -1;
    const groups = tasks.map(({ task, functions }) => h("optgroup", { label: task }, ...functions.filter((one) => one.has_graph).map((one) => {
      const value = `graph?${new URLSearchParams({ task, id: one.id })}`;
      if (one.total_ms > longest) [this.first, longest] = [value, one.total_ms];
      return h("option", { value }, `${one.name}  (${one.line})`);
    })));
    this.choice.replaceChildren(...groups.filter((group) => group.children.length));
    this.choice.disabled = this.first === undefined;
  }

  async show(value) {
    this.shown = value;
    this.place.setAttribute("aria-busy", "true");
    try {
      const { graph, name, task } = await ask(`api/${value}`);
      if (value !== this.shown) return; // another function was chosen meanwhile
      this.task = task;
      this.place.replaceChildren(this.view.element);
      await this.view.show({ ...graph, title: graph.title || name }, this.own());
    } catch (error) {
      if (value === this.shown) this.fail(error);
    }
    if (value === this.shown || !this.shown) this.place.removeAttribute("aria-busy");
  }

  /** The measured items of the shown task's steps: its own, and those of tasks that call no function themselves. */
  own() {
    return this.items.filter(({ task }) => task === this.task || !this.callers.has(task));
  }

  measure(items) {
    this.items = items;
    if (this.view.model) this.view.measure(this.own());
  }
}
