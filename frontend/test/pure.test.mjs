// The parts of the page that need no browser.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fromBase64, gunzip, unpack } from "../src/decode.js";
import { brief, bytes, compact, percent, plural, shape, show, tail, tick, visible } from "../src/format.js";
import { readRoute, writeRoute } from "../src/route.js";
import { countTypes, indexModules, parseQuery, unfoldAtFirst, visibleRows } from "../src/rows.js";
import { colours, fitScale, quantiles, ticks } from "../src/scales.js";

test("numbers are short and keep their size", () => {
  assert.equal(show(0), "0");
  assert.equal(show(12345), "12,345");
  assert.equal(show(0.0123456), "0.01235");
  assert.equal(show(-1.234e-7), "−1.23e−7");
  assert.equal(show(NaN), "–");
  assert.equal(show(null), "–");
  assert.equal(show(-Infinity), "−∞");
  assert.equal(brief(-0.007188), "−7.2e−3");
  assert.equal(brief(9.137), "9.1");
});

test("numbers on an axis differ from those a step away", () => {
  assert.deepEqual([0.58213, 0.582132, 0.582134].map((value) => tick(value, 2e-6)), ["0.58213", "0.582132", "0.582134"]);
  assert.deepEqual([1, 1.0000025].map((value) => tick(value, 2.5e-6)), ["1", "1.0000025"]);
  assert.deepEqual([-3.00002e-7, -3.00004e-7].map((value) => tick(value, 2e-12)), ["−3.00002e−7", "−3.00004e−7"]);
  assert.deepEqual([1234.5678, 1234.5679].map((value) => tick(value, 1e-4)), ["1,234.5678", "1,234.5679"]);
  assert.deepEqual([0, 0.1 + 0.2, 12.5].map((value) => tick(value, 0.1)), ["0", "0.3", "12.5"]);
  assert.equal(tick(0.0123456, NaN), "0.01235");
});

test("counts, shares, sizes and shapes are for people", () => {
  assert.deepEqual([950, 1234, 2_500_000, 999_999].map(compact), ["950", "1.2K", "2.5M", "1M"]);
  assert.deepEqual([NaN, 0, 0.0001, 0.5, 0.99999, 1].map(percent), ["–", "0 %", "< 0.1 %", "50 %", "> 99.9 %", "100 %"]);
  assert.equal(bytes(3_500_000), "3.5 MB");
  assert.equal(shape([2, 3]), "2 × 3");
  assert.equal(shape([]), "a number");
  assert.equal(plural(1, "call"), "1 call");
  assert.equal(tail("blocks.0.norm.weight", 10), "…rm.weight");
});

test("a name can be seen, and does not turn the writing around", () => {
  assert.deepEqual(["fc", "", " ", "ab\u202ecd", "שכבה"].map(visible), ["fc", "", "' '", "ab\\u202ecd", "שכבה"]);
});

test("an address keeps any place", () => {
  for (const place of ["conv1:grad_output", 'a"b<c>&d=e#f', "層.0", "100%", ""]) {
    assert.equal(readRoute(writeRoute({ place })).place, place);
  }
  assert.deepEqual(readRoute("#place=%zz"), { place: "%zz" });
  assert.equal(writeRoute({ place: undefined }), "#");
});

const modules = ["", "a", "a.b", "a.b.c", "a.d", "e"].map((path) => ({
  path,
  type: path === "" ? "Net" : path.endsWith("c") ? "Conv2d" : "Block",
  parent: path === "" ? null : ["", "a", "a.b", "a.b.c", "a.d", "e"].indexOf(path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : ""),
  called: path !== "e",
}));
const nodes = indexModules(modules, [{ module: 3, chunk: "e0" }]);
const names = (found) => found.rows.map((row) => row.node.path);

test("the tree shows what is unfolded", () => {
  assert.deepEqual(names(visibleRows(nodes, new Set([0]), parseQuery(""))), ["", "a", "e"]);
  assert.deepEqual(names(visibleRows(nodes, new Set([0, 1]), parseQuery(""))), ["", "a", "a.b", "a.d", "e"]);
  assert.equal(nodes[3].depth, 3);
  assert.equal(nodes[0].below, 1);
});

test("a search shows what fits and what is above it, folded or not", () => {
  const found = visibleRows(nodes, new Set(), parseQuery("CONV a.b"));
  assert.deepEqual(names(found), ["", "a", "a.b", "a.b.c"]);
  assert.equal(found.matches, 1);
  assert.deepEqual(found.rows.map((row) => row.match), [false, false, false, true]);
  assert.equal(visibleRows(nodes, new Set(), parseQuery("nothing")).rows.length, 0);
});

test("filters show modules with data, never called, or of a type", () => {
  assert.deepEqual(names(visibleRows(nodes, new Set(), parseQuery("", "data"))), ["", "a", "a.b", "a.b.c"]);
  assert.deepEqual(names(visibleRows(nodes, new Set(), parseQuery("", "uncalled"))), ["", "e"]);
  assert.equal(visibleRows(nodes, new Set(), parseQuery("", "all", "Block")).matches, 4);
  assert.deepEqual(countTypes(nodes)[0], ["Block", 4]);
});

test("at first as many levels are unfolded as stay short", () => {
  assert.deepEqual([...unfoldAtFirst(nodes, 3)], [0]);
  assert.deepEqual([...unfoldAtFirst(nodes, 60)].sort(), [0, 1, 2]);
});

test("a chunk is read as it was packed", () => {
  const header = new TextEncoder().encode(JSON.stringify({ meta: { a: 1 }, arrays: { x: ["f2", 0, [6]], y: ["u4", 16, [1, 2]] } }));
  const length = Math.ceil(header.length / 8) * 8;
  const buffer = new ArrayBuffer(8 + length + 24);
  new DataView(buffer).setBigUint64(0, BigInt(length), true);
  new Uint8Array(buffer, 8, length).fill(32).set(header);
  new Uint16Array(buffer, 8 + length, 6).set([0x3c00, 0xc000, 0x0001, 0x7c00, 0xfc00, 0x7e00]);
  new Uint32Array(buffer, 8 + length + 16, 2).set([7, 4294967295]);
  const { meta, arrays } = unpack(buffer);
  assert.deepEqual(meta, { a: 1 });
  assert.deepEqual([...arrays.x.data], [1, -2, 2 ** -24, Infinity, -Infinity, NaN]);
  assert.deepEqual([...arrays.y.data], [7, 4294967295]);
  assert.deepEqual(arrays.y.shape, [1, 2]);
});

test("gzip in base64 is unpacked", async () => {
  const { gzipSync } = await import("node:zlib");
  const text = gzipSync(Buffer.from("hookline")).toString("base64");
  assert.equal(new TextDecoder().decode(await gunzip(fromBase64(text))), "hookline");
});

test("a scale is centred for both signs, and outliers do not stretch it", () => {
  const data = Float32Array.from({ length: 2001 }, (_, n) => Math.sin(n));
  data[1000] = 1e6;
  const scale = fitScale(data);
  assert.equal(scale.kind, "diverging");
  assert.ok(scale.high < 1.1 && scale.low === -scale.high);
  assert.equal(scale.position(0), 128);
  assert.equal(scale.position(1e9), 255);
  assert.equal(scale.position(NaN), -1);
});

test("a scale from 0 is sequential, over many sizes logarithmic", () => {
  assert.equal(fitScale(Float32Array.of(0, 1, 2, 3)).kind, "sequential");
  const wide = fitScale(Float32Array.of(1e-6, 1e-4, 1e-2, 1), { signed: false, log: true });
  assert.ok(wide.log);
  assert.ok(wide.position(1e-3) > 100 && wide.position(1e-3) < 160);
  assert.equal(fitScale(Float32Array.of(5, 5, 5)).position(5), 0);
});

test("colours are 256 triples, and quantiles skip what is not finite", () => {
  assert.equal(colours("light", "diverging").length, 768);
  assert.deepEqual(quantiles([3, NaN, 1, Infinity, 2], [0, 0.5, 1]), [1, 2, 3]);
  assert.deepEqual(quantiles([], [0.5]), [0]);
});

test("ticks come to an end where numbers are too large to differ by a step", () => {
  assert.deepEqual(ticks(1e16, 1e16 + 2, 5), [1e16, 1e16 + 2]);
  assert.deepEqual(ticks(-1, 2, 5), [-1, 0, 1, 2]);
});

test("ticks are round numbers inside the bounds", () => {
  assert.deepEqual(ticks(-1, 1, 4), [-1, -0.5, 0, 0.5, 1]);
  assert.deepEqual(ticks(3, 3), [3]);
  assert.ok(ticks(1e-9, 5e-9).every((x) => x >= 1e-9 && x <= 5.0001e-9));
});
