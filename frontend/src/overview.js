// What is shown before a module is chosen: facts, findings, training, and a walk along the layers.

import { curve, heatmap, profile } from "./charts.js";
import { costsIn } from "./costs.js";
import { fill, h, icon } from "./dom.js";
import { plural, show, tick, visible } from "./format.js";
import { legend, notFinite } from "./pictures.js";
import { colour, surface } from "./surface.js";

const FEW = 6;

export function overview(app) {
  const { page } = app;
  const parts = [facts(page), findings(app)];
  if (page.run) parts.push(...training(app));
  else parts.push(along(app), distributions(app), largest(app));
  parts.push(sampled(page));
  return h("div", { class: "overview" }, parts);
}

function facts(page) {
  return h(
    "dl",
    { class: "facts", "aria-label": "Summary" },
    page.facts.map(([name, value, title]) => h("div", { title: title || null }, h("dt", {}, name), h("dd", {}, value))),
  );
}

export function section(title, aside, ...children) {
  return h("section", {}, h("div", { class: "section-head" }, h("h2", {}, title), aside), children);
}

function findings(app) {
  const found = app.page.findings || [];
  if (!found.length) return null;
  const list = h("ul", { class: "findings" });
  const draw = (all) => {
    const shown = all ? found : found.slice(0, FEW);
    const more = found.length - shown.length;
    fill(
      list,
      shown.map((one) => finding(app, one)),
      more > 0 ? h("li", { class: "more" }, h("button", { type: "button", class: "link", onclick: () => draw(true) }, `Show ${more} more`)) : null,
    );
  };
  draw(false);
  const total = app.page.run?.findings ?? found.length; // of very many, errors and the latest are on the page
  return section("Findings", h("span", { class: "aside" }, `${total > found.length ? `${found.length} of ` : ""}${plural(total, "finding")}`), list);
}

function finding(app, one) {
  const known = one.place !== null && one.place !== undefined && app.hasPlace(one.place);
  const where = one.place === "" ? "the model" : visible(one.place ?? "");
  const place = known ? h("a", { href: app.link(one.place, one.step ?? undefined), class: "path" }, where) : h("span", { class: "path" }, where);
  return h(
    "li",
    { class: one.severity },
    h("span", { class: "sign", title: one.severity }, icon(one.severity === "error" ? "error" : "warning"), h("span", { class: "offscreen" }, `${one.severity}: `)),
    h(
      "div",
      {},
      h("div", { class: "what" }, h("strong", {}, one.kind), place, one.step === null || one.step === undefined ? null : h("span", { class: "step" }, `step ${show(one.step)}`)),
      h("p", {}, one.message, one.advice ? h("span", { class: "advice" }, ` ${one.advice}`) : null),
    ),
  );
}

/** Curves of the scalars, and the map of layers × steps. */
function training(app) {
  const { run } = app.page;
  const parts = [];
  if (run.scalars.length) {
    const box = h("div", { class: "scalars" });
    app.chunk("scalars").then((chunk) => {
      const series = chunk.meta.names.map((name, n) => ({ name, steps: chunk.arrays[`s${n}`].data, values: chunk.arrays[`v${n}`].data }));
      const charts = new Map();
      const card = (one) => {
        const last = one.values[one.values.length - 1];
        const chart = curve(one, { title: h("h3", {}, one.name), alt: `${one.name} over ${one.steps.length} steps; the last value is ${Number.isNaN(last) ? "not finite" : show(last)}` });
        charts.set(one.name, chart);
        return chart;
      };
      fill(box, series.map(card));
      app.onScalars = (update) => {
        for (const one of update) {
          const chart = charts.get(one.name);
          if (chart) chart.update(one);
          else box.append(card(one));
        }
      };
    }, app.failed);
    parts.push(section("Training", null, box));
  }
  if (run.maps.length) parts.push(layersBySteps(app));
  return parts;
}

function layersBySteps(app) {
  const { run } = app.page;
  const choice = (app.mapChoice ??= { map: 0, statistic: null });
  const holder = h("div", { class: "map" });
  const scroller = h("div", { class: "map-scroll" });
  const foot = h("div", {});
  holder.append(scroller, foot);
  const select = h("select", { class: "chip", "aria-label": "Statistic" });
  const kinds = run.maps.map((map, n) => h("button", { type: "button", class: "chip", onclick: () => choose(n) }, map.title));
  const draw = async () => {
    const map = run.maps[choice.map] ?? run.maps[0];
    const statistic = map.statistics.includes(choice.statistic) ? choice.statistic : (map.statistics.includes("std") ? "std" : map.statistics[0]);
    kinds.forEach((button, n) => button.setAttribute("aria-pressed", n === choice.map ? "true" : "false"));
    fill(select, map.statistics.map((name) => h("option", { value: name, selected: name === statistic }, name)));
    const chunk = await app.chunk(`map:${choice.map}:${map.statistics.indexOf(statistic)}`);
    const labels = map.entries.map((n) => visible(app.page.entries[n].place) || "model");
    const steps = Array.from(chunk.arrays.steps.data);
    if (!steps.length) {
      fill(scroller, h("p", { class: "empty" }, "No step has been measured yet."));
      fill(foot);
      return;
    }
    const measured = chunk.arrays.measured.data;
    const { box, scale } = heatmap({
      labels,
      steps,
      data: chunk.arrays.values.data,
      measured,
      signed: statistic === "mean" ? true : false,
      statistic,
      alt: `${statistic} of ${labels.length} places over ${steps.length} steps, from ${show(steps[0])} to ${show(steps[steps.length - 1])}. Arrows move, Enter opens the place.`,
      chosen: (row, column) => app.open(app.page.entries[map.entries[row]].place, column === null ? undefined : steps[column]),
    });
    fill(scroller, box);
    const gap = measured.includes(0) ? h("span", {}, h("i", { class: "hatched" }), "not measured") : null;
    const broken = chunk.arrays.values.data.some((value, n) => measured[n] && !Number.isFinite(value)) ? notFinite() : null;
    const key = gap || broken ? h("div", { class: "key" }, gap, broken) : null;
    fill(foot, legend(scale), key, chunk.meta.note ? h("p", { class: "note" }, chunk.meta.note) : null);
  };
  const choose = (n) => {
    choice.map = n;
    draw().catch(app.failed);
  };
  select.addEventListener("change", () => {
    choice.statistic = select.value;
    draw().catch(app.failed);
  });
  app.onSteps = () => draw().catch(app.failed);
  draw().catch(app.failed);
  return section("Layers over steps", h("div", { class: "choices" }, h("div", { class: "chips", role: "group", "aria-label": "What is measured" }, kinds), select), holder);
}

/** The spread of outputs and gradients along the layers. */
function along(app) {
  const { page, nodes } = app;
  const rows = [];
  for (const node of nodes) {
    const groups = new Map();
    for (const n of node.entries) {
      const entry = page.entries[n];
      if (entry.group.startsWith("output") && entry.summary?.std !== undefined) {
        const found = groups.get(entry.group) || {};
        found[entry.gradient ? "gradient" : "value"] = entry;
        groups.set(entry.group, found);
      }
    }
    if (node.children.length && node.parent === null && nodes.length > 1) continue; // the model itself
    for (const found of groups.values()) rows.push(found);
  }
  const series = [
    { name: "output", values: rows.map((row) => row.value?.summary.std ?? NaN) },
    { name: "gradient", values: rows.map((row) => row.gradient?.summary.std ?? NaN) },
  ].filter((one) => one.values.some((value) => value > 0));
  if (rows.length < 2 || !series.length) return null;
  const labels = rows.map((row) => (row.value ?? row.gradient).place);
  const chart = profile({
    labels,
    series,
    alt: `Standard deviation along ${labels.length} places in model order`,
    chosen: (n) => app.open(labels[n]),
  });
  const key = h("div", { class: "key" }, series.map((one, n) => h("span", {}, h("i", { class: `dot series-${n}` }), one.name)));
  return section("Along the layers", key, h("p", { class: "lead" }, "The standard deviation at each place, in model order. Choose a point to see its values."), chart);
}

const TILES = 60;

/** A small histogram of every value that is no gradient; each is read when it comes into view. */
function distributions(app) {
  const { entries } = app.page;
  const all = app.nodes.flatMap((node) => node.entries.map((n) => entries[n])).filter((entry) => entry.chunk && !entry.gradient && entry.summary?.min !== undefined);
  const kinds = [
    ["values", all.filter((entry) => !entry.weight)],
    ["parameters", all.filter((entry) => entry.weight)],
  ].filter(([, found]) => found.length);
  if (all.length < 2) return null;
  const box = h("div", { class: "tiles" });
  const more = h("button", { type: "button", class: "link", onclick: () => add(300) });
  let shown = [];
  let count = 0;
  const add = (by) => {
    for (const entry of shown.slice(count, count + by)) box.append(tile(app, entry));
    count = Math.min(shown.length, count + by);
    more.textContent = `Show ${Math.min(300, shown.length - count)} more of ${shown.length}`;
    more.hidden = count >= shown.length;
  };
  const chips = kinds.map(([name, found], n) => h("button", { type: "button", class: "chip", onclick: () => choose(n) }, `${name} · ${found.length}`));
  const choose = (wanted) => {
    chips.forEach((chip, n) => chip.setAttribute("aria-pressed", n === wanted ? "true" : "false"));
    [, shown] = kinds[wanted];
    count = 0;
    fill(box);
    add(TILES);
  };
  choose(0);
  return section("Distributions", kinds.length > 1 ? h("div", { class: "chips", role: "group", "aria-label": "Which distributions" }, chips) : h("span", { class: "aside" }, plural(all.length, "place")), box, more);
}

function tile(app, entry) {
  const { min, max } = entry.summary;
  let counts = null;
  const chart = surface({
    alt: `Histogram of ${entry.place || "the model"}, from ${show(min)} to ${show(max)}`,
    height: () => 44,
    draw(context, width, height) {
      context.clearRect(0, 0, width, height);
      context.fillStyle = colour("line-strong");
      context.fillRect(0, height - 1, width, 1);
      if (!counts) {
        read();
        return;
      }
      const most = counts.reduce((a, b) => Math.max(a, b), 1);
      const wide = width / counts.length;
      context.fillStyle = colour("bar");
      if (counts.length === 1) {
        context.fillRect(width / 2 - 2, 3, 4, height - 3); // one number, and nothing else
        return;
      }
      counts.forEach((n, k) => n && context.fillRect(k * wide, height - Math.max(1, (n / most) * (height - 3)), Math.max(1, wide - 0.4), Math.max(1, (n / most) * (height - 3))));
    },
  });
  const read = () =>
    app.chunk(entry.chunk).then((chunk) => {
      const item = chunk.meta.all ?? chunk.meta.items.find((one) => one.counts);
      counts = item?.counts ? Array.from(chunk.arrays[item.counts].data) : [];
      if (counts.length) chart.redraw();
    }, app.failed);
  return h(
    "a",
    { class: "tile", href: app.link(entry.place), title: entry.place },
    h("span", { class: "path" }, h("bdi", {}, visible(entry.place) || "the model")),
    chart,
    h("span", { class: min === max ? "ends one" : "ends" }, h("span", {}, tick(min, max - min)), min === max ? null : h("span", {}, tick(max, max - min))),
  );
}

/** The modules without modules in them that cost most. */
function largest(app) {
  const leaves = app.nodes.filter((node) => !node.children.length);
  const costs = costsIn(leaves);
  if (leaves.length < 2 || !costs.length) return null;
  const box = h("div", { class: "largest" });
  const chips = costs.map((cost) => h("button", { type: "button", class: "chip", onclick: () => draw(cost) }, cost.title));
  const draw = ({ key, most, show: write }) => {
    chips.forEach((chip, n) => chip.setAttribute("aria-pressed", costs[n].key === key ? "true" : "false"));
    const sorted = leaves.filter((node) => node.module[key] > 0).sort((a, b) => b.module[key] - a.module[key]);
    const total = leaves.reduce((sum, node) => sum + (node.module[key] || 0), 0);
    const row = (node) =>
      h(
        "a",
        { href: app.link(node.module.place) },
        h("span", { class: "path" }, h("bdi", {}, visible(node.path))),
        h("span", { class: "type" }, node.type),
        h("span", { class: "meter" }, h("i", { style: { width: `${(100 * node.module[key]) / most}%` } })),
        h("span", { class: "amount" }, write(node.module[key])),
        h("span", { class: "share" }, `${((100 * node.module[key]) / total).toFixed(1)} %`),
      );
    fill(box, sorted.slice(0, 8).map(row));
  };
  draw(costs[0]);
  return section("What costs most", costs.length > 1 ? h("div", { class: "chips", role: "group", "aria-label": "Cost" }, chips) : h("span", { class: "aside" }, costs[0].title), box);
}

function sampled(page) {
  if (!page.notes?.length) return null;
  return h("aside", { class: "notes" }, h("h2", {}, "About this page"), page.notes.map((note) => h("p", {}, note)));
}
