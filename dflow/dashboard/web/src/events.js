// The events of the cluster, newest first.
import { emptyState, h } from "./dom.js";
import { counted } from "./format.js";
import { eventRow } from "./overview.js";
import { ask } from "./stream.js";

const MOST = 2000;

export class Events {
  constructor(page) {
    this.title = "Events";
    this.page = page;
    this.events = [];
    this.newest = 0;
    this.kind = h("select", { "aria-label": "Kinds of events", onchange: () => this.draw() }, h("option", { value: "" }, "all kinds"));
    this.list = h("ol", { class: "events", "aria-live": "polite" });
    this.lost = h("p", { class: "faint more" });
    this.element = h("section", { class: "card" }, h("h2", {}, "Events of the coordinator", h("span", { class: "spring" }), this.kind), this.list, this.lost);
    this.draw();
  }

  restart() {
    Object.assign(this, { events: [], newest: 0 });
    this.lost.textContent = "";
    this.add([]);
  }

  async refetch() {
    const { runs } = this.page;
    try {
      const { events, lost } = await ask(`api/events?since=${this.newest}`);
      if (runs !== this.page.runs) return;
      if (lost) this.lost.textContent = `${counted(lost, "older event")} are not kept.`;
      this.add(events);
    } catch (error) {
      this.lost.textContent = error.message;
    }
  }

  add(events) {
    const fresh = events.filter((event) => event.number > this.newest);
    if (!fresh.length && this.events.length) return;
    this.events = [...this.events, ...fresh].slice(-MOST);
    this.newest = this.events.at(-1)?.number ?? 0;
    const known = new Set([...this.kind.options].map((option) => option.value));
    for (const kind of new Set(fresh.map((event) => event.kind))) if (!known.has(kind)) this.kind.append(h("option", { value: kind }, kind));
    this.draw();
    this.page.tabs.overview.showEvents(this.events);
  }

  draw() {
    const shown = this.events.filter((event) => !this.kind.value || event.kind === this.kind.value).reverse();
    this.list.replaceChildren(...(shown.length ? shown.map(eventRow) : [h("li", { class: "wide" }, emptyState("No events yet", "Joins, deaths, restarts, snapshots and stalls appear here as they happen."))]));
  }
}
