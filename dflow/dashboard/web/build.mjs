// Build ../static from src/: `make dashboard`. The built files are committed, so that users need no node.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "static");
const common = { bundle: true, minify: true, format: "iife", target: "es2022", write: false, charset: "utf8", legalComments: "none" };

async function bundled(entry, options = {}) {
  const { outputFiles } = await build({ ...common, entryPoints: [join(here, entry)], outdir: out, ...options });
  return Object.fromEntries(outputFiles.map((file) => [file.path.split(".").pop(), file.text]));
}

const page = { ...(await bundled("src/main.js")), ...(await bundled("src/dashboard.css")) };
const css = (await bundled("src/notebook.css")).css;
const notebook = await bundled("src/notebook.js", { define: { NOTEBOOK_CSS: JSON.stringify(css) } });

function sources(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    if (entry.name === "node_modules") return [];
    const path = join(folder, entry.name);
    return entry.isDirectory() ? sources(path) : [relative(here, path).replaceAll("\\", "/")];
  });
}

// dflow's test computes the same digest: of each path and its content, in order.
const digest = createHash("sha256");
for (const path of sources(here).sort()) digest.update(`${path}\0`).update(readFileSync(join(here, path))).update("\0");

const licences = ["uplot", "@dagrejs/dagre", "@dagrejs/graphlib"].map((name) => {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  return `${name} ${version}\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}\n`;
});

const files = {
  "index.html": readFileSync(join(here, "src", "index.html"), "utf8"),
  "dashboard.js": page.js,
  "dashboard.css": page.css,
  "graph.js": notebook.js,
  "LICENSES.txt": `The built files contain these packages:\n\n${licences.join(`\n${"-".repeat(80)}\n\n`)}`,
};
rmSync(out, { recursive: true, force: true });
mkdirSync(out);
const built = {};
for (const [name, text] of Object.entries(files)) {
  writeFileSync(join(out, name), text);
  built[name] = createHash("sha256").update(text).digest("hex");
}
writeFileSync(join(out, "built.json"), `${JSON.stringify({ sources: digest.digest("hex"), files: built }, null, 2)}\n`);
for (const [name, text] of Object.entries(files)) console.log(`${name}: ${(text.length / 1000).toFixed(1)} kB`);
