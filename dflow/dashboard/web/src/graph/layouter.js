// Layouts from a web worker, so that the page stays responsive; without workers from this thread.
import { scriptUrl } from "../script.js";
import { laidOut } from "./layout.js";

export class Layouter {
  constructor() {
    this.waiting = new Map();
    this.number = 0;
    try {
      this.worker = new Worker(scriptUrl());
      this.worker.onmessage = ({ data }) => this.settle(data.number, data.error, data.result);
      this.worker.onerror = () => this.withoutWorker();
    } catch {
      this.worker = null;
    }
  }

  layout(asked) {
    if (!this.worker) return Promise.resolve().then(() => laidOut(asked));
    const number = ++this.number;
    return new Promise((resolve, reject) => {
      this.waiting.set(number, { asked, resolve, reject });
      this.worker.postMessage({ number, asked });
    });
  }

  settle(number, error, result) {
    const { resolve, reject } = this.waiting.get(number);
    this.waiting.delete(number);
    if (error) reject(new Error(error));
    else resolve(result);
  }

  withoutWorker() {
    this.worker = null;
    for (const { asked, resolve } of this.waiting.values()) resolve(laidOut(asked));
    this.waiting.clear();
  }
}
