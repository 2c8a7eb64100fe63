// A graph in a page of its own, such as a notebook's output: the data is in the page, gzipped and in base64.
import { GraphView } from "./graph/view.js";
import { h } from "./dom.js";

/* global NOTEBOOK_CSS */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function show(place) {
  document.head.append(h("style", {}, NOTEBOOK_CSS));
  const data = await unpacked(document.getElementById("data").textContent);
  const view = new GraphView();
  place.replaceChildren(view.element);
  await view.show(data);
  // Milliseconds since the page was opened.
  document.documentElement.dataset.shownMs = String(Math.round(performance.now()));
}

const place = document.getElementById("graph");
show(place).catch((error) => place.replaceChildren(h("p", {}, `The graph could not be drawn: ${error.message}`)));
