// The stream of the server's events, with reconnection, and requests for JSON.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
/** The server sends a state each second; without any message for this long, the connection counts as lost. */
const SILENT_MS = 6000;

async function fetched(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("The dashboard's server does not answer.");
  }
}

/** Fetch JSON. Throws an Error with the server's text and remedy. */
export async function ask(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return dataOf(path, await fetched(path, options));
}

async function dataOf(path, answer) {
  const data = await answer.json().catch(() => null);
  if (answer.ok && data !== null) return data;
  const error = data?.error ?? { text: `${path}: expected JSON, got status ${answer.status}`, remedy: "" };
  throw Object.assign(new Error([error.text, error.remedy].filter(Boolean).join("\n")), { status: answer.status });
}

/** Calls handlers[event](data) for each event, and onchange(isLost, text) when the connection is lost or found. */
export class Stream {
  constructor(path, handlers, onchange) {
    Object.assign(this, { path, handlers, onchange, wait: FIRST_WAIT_MS, lost: false, heard: Date.now() });
    this.open();
    setInterval(() => this.check(), 1000);
    addEventListener("online", () => this.reopen());
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.lost && this.reopen());
  }

  open() {
    this.source = new EventSource(this.path);
    this.source.onerror = () => this.lose();
    for (const [name, handler] of Object.entries(this.handlers)) {
      this.source.addEventListener(name, (event) => {
        this.hear();
        handler(JSON.parse(event.data));
      });
    }
  }

  hear() {
    this.heard = Date.now();
    this.wait = FIRST_WAIT_MS;
    if (!this.lost) return;
    this.lost = false;
    this.onchange(false, "");
  }

  check() {
    if (Date.now() - this.heard > SILENT_MS && document.visibilityState === "visible") this.lose();
  }

  lose() {
    this.source.close();
    if (this.timer) return;
    this.timer = setTimeout(() => this.reopen(), this.wait);
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
    this.heard = Date.now();
    if (!this.lost) {
      this.lost = true;
      this.onchange(true, "");
    }
    this.tellWhy().catch((error) => this.lost && this.onchange(true, error.message));
  }

  /** EventSource does not tell why it failed, such as that too many pages are open; a request does. */
  async tellWhy() {
    const answer = await fetched(this.path);
    if (answer.ok) await answer.body.cancel();
    else await dataOf(this.path, answer);
  }

  reopen() {
    clearTimeout(this.timer);
    this.timer = null;
    this.source.close();
    this.open();
  }
}
