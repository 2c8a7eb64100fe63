// The script that runs, which is also the script of the web worker: that way dagre is in the bundle once.

const script = globalThis.document?.currentScript;
export const isWorker = globalThis.document === undefined;

export function scriptUrl() {
  return script.src || URL.createObjectURL(new Blob([script.textContent], { type: "text/javascript" }));
}
