// Bundles src/ into hookline/view/page.js and page.css. With --check nothing is written: it fails
// if what lies there is not what the source gives.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "hookline", "view");

// tests/test_frontend.py computes the same digest, so that a stale bundle is seen without node.
function digestOfSource() {
  const digest = createHash("sha256");
  for (const name of readdirSync(join(here, "src")).sort()) {
    digest.update(name + "\0" + readFileSync(join(here, "src", name), "utf8") + "\0");
  }
  return digest.digest("hex");
}

async function bundle(entry, options) {
  const result = await build({
    entryPoints: [join(here, "src", entry)],
    bundle: true,
    minify: true,
    write: false,
    charset: "utf8",
    legalComments: "none",
    target: ["chrome100", "firefox113", "safari16.4"],
    ...options,
  });
  return result.outputFiles[0].text;
}

const license = readFileSync(join(here, "node_modules", "uplot", "LICENSE"), "utf8");
const head =
  `/* Built from frontend/src by npm run build; source sha256 ${digestOfSource()}\n` +
  `With uPlot (https://github.com/leeoniya/uPlot):\n${license.trim()}\n*/\n`;
const outputs = {
  "page.js": head + (await bundle("main.js", { format: "iife" })),
  "page.css": head.split("\n")[0] + " */\n" + (await bundle("page.css", {})),
};
for (const [name, text] of Object.entries(outputs)) {
  // Both lie inside the HTML, as they are.
  if (/<\/(script|style)|<!--/i.test(text) || text.includes("\r")) throw new Error(`${name} would break the page`);
  const path = join(target, name);
  if (!process.argv.includes("--check")) {
    writeFileSync(path, text);
    console.log(`${name}  ${(text.length / 1000).toFixed(1)} KB`);
  } else if (readFileSync(path, "utf8") !== text) {
    console.error(`hookline/view/${name} is not what frontend/src gives: run make frontend`);
    process.exitCode = 1;
  }
}
