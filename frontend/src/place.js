// A module with all that is known of it: each value, its gradient beside it.

import { curve } from "./charts.js";
import { costsOf } from "./costs.js";
import { copyButton, fill, h, icon } from "./dom.js";
import { brief, compact, percent, plural, shape, show, tick } from "./format.js";
import { histogramView, pictureView, statisticsView } from "./pictures.js";
import { colours, fitScale } from "./scales.js";
import { FONT, colour, surface, theme } from "./surface.js";

export function placeView(app, index, wanted) {
  const node = app.nodes[index];
  const { page } = app;
  const groups = grouped(node.entries.map((n) => page.entries[n]));
  const word = page.item;
  const counts = node.entries.map((n) => page.entries[n].count || 0);
  const most = Math.max(0, ...counts);
  const state = { item: Number(app.route[word] ?? 0) || 0, whole: {} };
  const cards = [...groups].map(([name, places]) => card(app, node, name, places, state, wanted));
  const slider = !page.run && most > 1 ? itemSlider(app, most, state, () => cards.forEach((one) => one.draw())) : null;
  return h(
    "div",
    { class: "place" },
    heading(app, node),
    slider,
    groups.size ? cards : h("p", { class: "empty" }, nothing(node)),
    below(app, node),
  );
}

function nothing(node) {
  const { module } = node;
  if (module.called === false) return `Never called. ${module.reason || ""}`;
  if (/^(ModuleList|ModuleDict|ParameterList|ParameterDict)$/.test(node.type)) return "A container: it holds modules and has no forward of its own.";
  return node.below ? "Nothing was captured at this module itself; there is something below it." : "Nothing was captured here.";
}

function heading(app, node) {
  const trail = [];
  for (let at = node; at; at = at.parent === null ? null : app.nodes[at.parent]) trail.unshift(at);
  const steps = trail.filter((at) => at.path);
  const crumbs = steps.map((at, n) => [
    n ? h("span", { class: "dot-sep" }, ".") : null,
    at === node ? h("span", { class: "here", "aria-current": "page" }, at.name) : h("a", { href: app.link(at.module.place) }, at.name),
  ]);
  const toggle = h("button", { type: "button", class: "chip", "aria-pressed": String(app.logged), title: "Counts of the histograms on a log scale", onclick: () => app.switchLog() }, "log counts");
  return h(
    "div",
    { class: "place-head" },
    h(
      "nav",
      { class: "crumbs", "aria-label": "Where this module is" },
      h("a", { href: app.link(undefined), "aria-label": "Overview" }, icon("home")),
      h("span", { class: "dot-sep" }, "/"),
      steps.length ? crumbs : h("span", { class: "here" }, "the model itself"),
      node.path ? copyButton(node.module.place, "path") : null,
    ),
    h(
      "div",
      { class: "title" },
      h("h1", { tabindex: -1 }, node.name),
      node.type ? h("span", { class: "badge" }, node.type) : null,
      h("span", { class: "grow" }),
      node.entries.length ? toggle : null,
      h("button", { type: "button", class: "quiet", title: "The module before (k)", "aria-label": "The module before", onclick: () => app.tree.step(-1) }, icon("up")),
      h("button", { type: "button", class: "quiet", title: "The next module (j)", "aria-label": "The next module", onclick: () => app.tree.step(1) }, icon("down")),
    ),
    about(node),
  );
}

/** One line of what is known of the module itself. */
function about(node) {
  const { module } = node;
  const facts = costsOf(module);
  if (node.children.length) facts.push(["modules inside", String(node.children.length)]);
  if (!facts.length) return null;
  return h("dl", { class: "inline-facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function grouped(entries) {
  const groups = new Map();
  for (const entry of entries) {
    if (!groups.has(entry.group)) groups.set(entry.group, []);
    groups.get(entry.group).push(entry);
  }
  for (const group of groups.values()) group.sort((a, b) => Boolean(a.gradient) - Boolean(b.gradient));
  return groups;
}

/** The slider over calls or samples; arrows move it, as every slider. */
function itemSlider(app, most, state, moved) {
  const word = app.page.item;
  const label = h("output", {});
  const tell = () => {
    const id = app.page.ids?.[state.item];
    label.textContent = `${word} ${state.item}${id !== undefined && String(id) !== String(state.item) ? ` · ${id}` : ""}`;
  };
  state.item = Math.min(state.item, most - 1);
  const input = h("input", {
    type: "range",
    min: 0,
    max: most - 1,
    value: state.item,
    "aria-label": word,
    oninput: () => {
      state.item = Number(input.value);
      tell();
      app.remember({ [word]: state.item || undefined });
      moved();
    },
  });
  tell();
  return h("div", { class: "slider" }, label, input, h("span", { class: "aside" }, `of ${plural(most, word)}`));
}

function card(app, node, name, places, state, wanted) {
  const asked = places.some((entry) => entry.place === wanted && entry.place !== node.module.place);
  const columns = places.map((entry) => column(app, entry, state, places.length));
  const box = h(
    "article",
    { class: "card", "data-group": name },
    h(
      "header",
      {},
      h("h2", {}, name.startsWith("/") ? `operation ${name.slice(1)}` : name),
      places[0].place === node.module.place ? null : [h("code", {}, places[0].place), copyButton(places[0].place, "place")],
    ),
    h("div", { class: places.length > 1 ? "pair" : "single" }, columns),
  );
  box.draw = () => columns.forEach((one) => one.draw());
  box.draw();
  if (asked) requestAnimationFrame(() => box.scrollIntoView({ block: "start" }));
  return box;
}

function column(app, entry, state, beside) {
  const body = h("div", { class: "body" });
  const role = entry.role || (entry.gradient ? "gradient" : "value");
  const box = h(
    "div",
    { class: `column${entry.gradient ? " gradient" : ""}` },
    h(
      "div",
      { class: "column-head" },
      beside > 1 || entry.gradient ? h("span", { class: "role" }, role) : null,
      entry.shape ? h("span", { class: "shape" }, shape(entry.shape)) : null,
      entry.dtype ? h("span", { class: "dtype" }, entry.dtype) : null,
    ),
    body,
  );
  let latest = 0;
  box.draw = async () => {
    if (!entry.chunk) {
      fill(body, h("p", { class: "empty" }, entry.note || "Nothing was kept."));
      return;
    }
    const turn = ++latest;
    try {
      const drawn = app.page.run ? await overTime(app, entry) : await oneItem(app, entry, state);
      if (turn === latest) fill(body, drawn);
    } catch (error) {
      fill(body, h("p", { class: "empty" }, `This could not be read: ${error.message}`));
    }
  };
  return box;
}

/** A call or a sample: picture, histogram, statistics. */
async function oneItem(app, entry, state) {
  const remote = app.page.live && app.page.kind === "store";
  const chunk = await app.chunk(remote ? `${entry.chunk}:${Math.min(state.item, entry.count - 1)}` : entry.chunk);
  const { items } = chunk.meta;
  const item = remote ? items[0] : (nearest(items, state.item) ?? items[0]);
  if (!item || item.missing) return h("p", { class: "empty" }, "This call had no such value.");
  const name = entry.place || "the model";
  const parts = [itemView(app, entry, item, chunk.arrays, name)];
  if (Number(item.label) !== Math.min(state.item, entry.count - 1)) parts.unshift(h("p", { class: "note" }, `${app.page.item} ${state.item} is not on this page; the nearest is ${item.label}.`));
  const whole = remote ? await (state.whole[entry.chunk] ??= app.chunk(entry.chunk)) : chunk;
  if (whole.meta.all) parts.push(h("h3", {}, "Many samples together"), itemView(app, entry, whole.meta.all, whole.arrays, `${name}, many samples`));
  return parts;
}

function nearest(items, wanted) {
  let best = null;
  for (const item of items) if (!best || Math.abs(Number(item.label) - wanted) < Math.abs(Number(best.label) - wanted)) best = item;
  return best;
}

function itemView(app, entry, item, arrays, name) {
  const kind = { maps: "Feature maps", sequence: "Positions × features", matrix: "Matrix", vector: "Vector", number: "The number" }[item.kind];
  const statistics = item.statistics;
  const alt = `${kind || "Picture"} of ${name}, shape ${shape(item.shape)}, values from ${show(statistics?.min)} to ${show(statistics?.max)}`;
  const notes = [...(item.sampled?.length ? [`Shown: ${item.sampled.join(", ")}.`] : []), ...(item.notes || []).map((note) => `${note[0].toUpperCase()}${note.slice(1)}.`)];
  const counts = item.counts ? arrays[item.counts].data : null;
  const varies = JSON.stringify(item.shape) !== JSON.stringify(entry.shape) && app.page.kind !== "store";
  return h(
    "div",
    { class: "item" },
    varies ? h("p", { class: "note" }, `Here ${shape(item.shape)}.`) : null,
    item.picture || item.kind === "number" ? pictureView(item, item.picture ? arrays[item.picture] : null, { gradient: entry.gradient, alt }) : null,
    counts && counts.length > 1 ? histogramView({ counts, low: item.low, high: item.high, logged: app.logged, alt: `Histogram of ${name}: ${describe(counts, item.low, item.high)}` }) : null,
    statisticsView(statistics),
    notes.length ? h("p", { class: "note" }, notes.join(" ")) : null,
  );
}

function describe(counts, low, high) {
  let most = 0;
  counts.forEach((count, n) => (most = count > counts[most] ? n : most));
  const wide = (high - low) / counts.length;
  return `from ${show(low)} to ${show(high)}, most values near ${show(low + (most + 0.5) * wide)}`;
}

const SHARES = new Set(["zeros", "dead", "saturated", "nonfinite"]);

/** A place of a run: statistics over steps, and how its distribution moved. */
async function overTime(app, entry) {
  const chunk = await app.chunk(entry.chunk);
  const { statistics } = chunk.meta;
  const steps = chunk.arrays.steps.data;
  const values = chunk.arrays.series.data;
  const count = steps.length;
  const of = (name) => values.subarray(statistics.indexOf(name) * count, (statistics.indexOf(name) + 1) * count);
  const shown = statistics.filter((name) => of(name).some((value) => Number.isFinite(value)));
  if (!shown.length) return h("p", { class: "empty" }, "Nothing has been measured here yet.");
  const key = `statistic ${entry.gradient}`;
  const chosen = shown.includes(app.choices[key]) ? app.choices[key] : shown.includes("std") ? "std" : shown[0];
  const holder = h("div", {});
  const select = h("select", { class: "chip", "aria-label": "Statistic", onchange: () => ((app.choices[key] = select.value), draw(select.value)) }, shown.map((name) => h("option", { value: name, selected: name === chosen }, name)));
  const draw = (name) => {
    const data = of(name);
    fill(holder, curve({ name, steps, values: data }, { title: select, tall: 160, gap: (n) => (of("nonfinite")[n] === 1 ? "not finite" : "not measured"), alt: `${name} of ${entry.place} over ${count} steps; the last value is ${show(data[count - 1])}` }));
  };
  draw(chosen);
  const at = last(shown.map(of), count);
  const parts = [holder];
  if (chunk.arrays.histograms && chunk.arrays.histograms.shape[0]) parts.push(distribution(app, entry, chunk));
  parts.push(h("dl", { class: "statistics" }, shown.map((name) => h("div", {}, h("dt", {}, name), h("dd", {}, (SHARES.has(name) ? percent : show)(of(name)[at]))))), h("p", { class: "note" }, `The numbers are those of step ${show(steps[at])}.`));
  return parts;
}

/** The last step at which anything was measured: a layer need not have run at all of them. */
function last(series, count) {
  let at = count - 1;
  while (at > 0 && series.every((data) => Number.isNaN(data[at]))) at--;
  return at;
}

/** Histograms over steps: a map of steps × values, and the one at a step. */
function distribution(app, entry, chunk) {
  const steps = Array.from(chunk.arrays.histogram_steps.data);
  const [count, bins] = chunk.arrays.histograms.shape;
  const counts = chunk.arrays.histograms.data;
  const lows = chunk.arrays.lows.data;
  const highs = chunk.arrays.highs.data;
  // Where somebody has put the slider it stays while a run goes on; at the end it goes along.
  const key = `step ${entry.place} ${app.route.step}`;
  const wanted = Number(app.choices[key] ?? app.route.step ?? NaN);
  let at = count - 1;
  if (Number.isFinite(wanted)) steps.forEach((step, n) => (at = Math.abs(step - wanted) < Math.abs(steps[at] - wanted) ? n : at));
  const label = h("output", {});
  const holder = h("div", {});
  const draw = () => {
    label.textContent = `step ${show(steps[at])}`;
    fill(holder, histogramView({ counts: counts.subarray(at * bins, (at + 1) * bins), low: lows[at], high: highs[at], logged: app.logged, alt: `Histogram of ${entry.place} at step ${steps[at]}` }));
  };
  draw();
  const moved = () => {
    at = Number(input.value);
    app.choices[key] = at < count - 1 ? steps[at] : undefined;
    draw();
  };
  const input = h("input", { type: "range", min: 0, max: count - 1, value: at, "aria-label": "step", oninput: moved });
  const flow = count > 1 ? flowView(entry, { steps, counts, lows, highs, count, bins }) : null;
  return h("div", { class: "distribution" }, flow, h("div", { class: "slider small" }, label, input), holder);
}

/** Each histogram as a column, all on one axis of values. */
function flowView(entry, { steps, counts, lows, highs, count, bins }) {
  const sorted = [Array.from(lows).sort((a, b) => a - b), Array.from(highs).sort((a, b) => a - b)];
  const low = sorted[0][Math.floor(count * 0.05)];
  const high = sorted[1][Math.ceil(count * 0.95) - 1];
  const tall = 96;
  const density = new Float32Array(count * tall);
  for (let n = 0; n < count; n++) {
    let total = 0;
    for (let k = 0; k < bins; k++) total += counts[n * bins + k];
    const wide = (highs[n] - lows[n]) / bins || 1;
    for (let y = 0; y < tall; y++) {
      const value = high - ((y + 0.5) / tall) * (high - low);
      const k = Math.floor((value - lows[n]) / wide);
      density[y * count + n] = k >= 0 && k < bins ? Math.sqrt(counts[n * bins + k] / total / wide) : 0;
    }
  }
  const scale = fitScale(density, { signed: false });
  const alike = brief(low) === brief(high);
  const [top, bottom] = [high, low].map((value) => (alike ? tick(value, high - low) : brief(value)));
  const left = Math.max(58, 14 + 6.5 * Math.max(top.length, bottom.length));
  return surface({
    alt: `How the distribution of ${entry.place} moved over ${count} steps, values from ${show(low)} to ${show(high)}`,
    height: () => 130,
    draw(context, width, height) {
      const table = colours(theme(), "sequential");
      context.clearRect(0, 0, width, height);
      const wide = (width - left) / count;
      const cell = (height - 18) / tall;
      for (let n = 0; n < count; n++) {
        for (let y = 0; y < tall; y++) {
          const at = scale.position(density[y * count + n]);
          if (at <= 0) continue;
          context.fillStyle = `rgb(${table[3 * at]} ${table[3 * at + 1]} ${table[3 * at + 2]})`;
          context.fillRect(left + n * wide, y * cell, wide + 0.5, cell + 0.5);
        }
      }
      context.font = FONT;
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      context.textBaseline = "top";
      context.fillText(top, left - 8, 0);
      context.textBaseline = "bottom";
      context.fillText(bottom, left - 8, height - 18);
      context.textBaseline = "top";
      context.textAlign = "left";
      context.fillText(show(steps[0]), left, height - 14);
      context.textAlign = "right";
      context.fillText(show(steps[count - 1]), width, height - 14);
    },
    hover(x, y, width) {
      const n = Math.floor(((x - left) / (width - left)) * count);
      return n >= 0 && n < count ? [`step ${show(steps[n])}`, `${show(lows[n])} … ${show(highs[n])}`] : null;
    },
  });
}

/** The modules inside, as a short list. */
function below(app, node) {
  if (!node.children.length) return null;
  const shown = node.children.slice(0, 200).map((n) => app.nodes[n]);
  return h(
    "section",
    { class: "below" },
    h("div", { class: "section-head" }, h("h2", {}, "Inside")),
    h(
      "ul",
      {},
      shown.map((child) =>
        h("li", {}, h("a", { href: app.link(child.module.place) }, h("span", { class: "path" }, child.name), h("span", { class: "type" }, child.type), child.module.parameters ? h("span", { class: "amount" }, compact(child.module.parameters)) : null)),
      ),
    ),
  );
}

