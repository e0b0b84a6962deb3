// The picture of a tensor by its kind, its histogram and its statistics.

import { h, fill } from "./dom.js";
import { percent, show, tick } from "./format.js";
import { colours, fitScale, paint, ticks } from "./scales.js";
import { FONT, colour, stretch, surface, theme } from "./surface.js";

const STATISTICS = [
  ["mean", "mean", show],
  ["std", "std", show],
  ["min", "min", show],
  ["max", "max", show],
  ["norm", "norm", show],
  ["zeros", "zeros", percent],
  ["nonfinite", "not finite", show],
];

/** The statistics as a list of names and numbers. */
export function statisticsView(found) {
  if (!found) return null;
  const shown = STATISTICS.filter(([key]) => found[key] !== undefined && !(key === "nonfinite" && !found[key]));
  return h(
    "dl",
    { class: "statistics" },
    shown.map(([key, name, form]) => h("div", { class: key === "nonfinite" ? "bad" : "" }, h("dt", {}, name), h("dd", {}, form(found[key])))),
  );
}

/** A histogram; `counts` are those of equal bins from low to high. */
export function histogramView({ counts, low, high, alt, logged = false, tall = 108 }) {
  const most = counts.reduce((a, b) => Math.max(a, b), 0);
  const lift = (count) => (logged ? Math.log1p(count) / Math.log1p(most) : count / (most || 1));
  const pad = { left: 2, right: 2, top: 6, bottom: 18 };
  return surface({
    alt,
    height: () => tall,
    draw(context, width, height) {
      const base = height - pad.bottom;
      const wide = (width - pad.left - pad.right) / counts.length;
      context.clearRect(0, 0, width, height);
      if (low < 0 && high > 0) {
        const zero = pad.left + (-low / (high - low)) * (width - pad.left - pad.right);
        context.fillStyle = colour("line-strong");
        context.fillRect(Math.round(zero), pad.top, 1, base - pad.top);
      }
      context.fillStyle = colour("bar");
      for (let n = 0; n < counts.length; n++) {
        if (!counts[n]) continue;
        const tallness = Math.max(1, lift(counts[n]) * (base - pad.top));
        const x = pad.left + n * wide;
        context.fillRect(x, base - tallness, Math.max(1, wide - (wide > 3 ? 1 : 0)), tallness);
      }
      context.fillStyle = colour("line-strong");
      context.fillRect(pad.left, base, width - pad.left - pad.right, 1);
      context.font = FONT;
      context.fillStyle = colour("muted");
      context.textBaseline = "top";
      if (counts.length === 1) {
        context.textAlign = "center";
        context.fillText(show(low), width / 2, base + 5);
        return;
      }
      const placed = ticks(low, high, width < 260 ? 3 : 5);
      for (const value of placed) {
        const x = pad.left + ((value - low) / (high - low)) * (width - pad.left - pad.right);
        const text = tick(value, placed[1] - placed[0]);
        const half = context.measureText(text).width / 2;
        context.textAlign = "center";
        context.fillText(text, Math.min(Math.max(x, half), width - half), base + 5);
      }
    },
    hover(x, y, width) {
      const n = Math.floor(((x - pad.left) / (width - pad.left - pad.right)) * counts.length);
      if (n < 0 || n >= counts.length) return null;
      const wide = (high - low) / counts.length;
      const range = counts.length === 1 ? show(low) : `${show(low + n * wide)} … ${show(low + (n + 1) * wide)}`;
      return [range, `${counts[n].toLocaleString("en-US")} values`];
    },
  });
}

/** A bar with the colours of a scale and the numbers at its ends. */
export function legend(scale) {
  const bar = surface({
    alt: `Colours from ${show(scale.low)} to ${show(scale.high)}`,
    height: () => 6,
    draw(context, width, height) {
      const table = colours(theme(), scale.kind);
      for (let x = 0; x < width; x++) {
        const n = Math.round((x / Math.max(width - 1, 1)) * 255);
        context.fillStyle = `rgb(${table[3 * n]} ${table[3 * n + 1]} ${table[3 * n + 2]})`;
        context.fillRect(x, 0, 1, height);
      }
    },
  });
  const middle = scale.kind === "diverging" ? h("span", {}, "0") : null;
  return h(
    "div",
    { class: "legend" },
    bar,
    h("div", { class: "ends" }, h("span", {}, tick(scale.low, scale.high - scale.low)), middle, h("span", {}, `${tick(scale.high, scale.high - scale.low)}${scale.log ? " (log)" : ""}`)),
  );
}

/** What the colour of numbers that are none means. */
export function notFinite() {
  return h("span", {}, h("i", { class: "broken" }), "not finite");
}

/** The picture of a tensor: feature maps, positions × features, a matrix or a vector. */
export function pictureView(item, array, { gradient, alt }) {
  if (item.kind === "number") return h("p", { class: "number" }, show(item.value));
  if (!array) return null;
  const [samples, panels, rows, columns] = array.shape;
  const unit = item.scale || 1;
  const data = unit === 1 ? array.data : Float64Array.from(array.data, (value) => value * unit);
  const scale = fitScale(data, { signed: gradient ? true : null });
  let sample = 0;
  const holder = h("div", { class: "picture" });
  const draw = () => {
    const start = sample * panels * rows * columns;
    const parts = { data, start, panels, rows, columns, scale, item, alt };
    fill(holder, item.kind === "vector" ? bars(parts) : item.kind === "maps" ? grid(parts) : cells(parts));
  };
  draw();
  const stepper = samples > 1 ? chooser(samples, singular(item.axes[0]), (n) => ((sample = n), draw())) : null;
  const finite = data.some((value) => Number.isFinite(value));
  const broken = finite && !data.every((value) => Number.isFinite(value));
  const key = !finite ? h("p", { class: "note" }, "Nothing in it is finite.") : item.kind === "vector" ? null : legend(scale);
  return h("div", { class: "pictured" }, stepper, holder, key, broken ? h("div", { class: "key" }, notFinite()) : null);
}

function singular(word) {
  return word.replace(/s$/, "");
}

/** Small buttons to choose one of a few samples. */
function chooser(count, word, chosen) {
  const buttons = Array.from({ length: count }, (_, n) =>
    h("button", { type: "button", class: "chip", "aria-pressed": n === 0 ? "true" : "false", "aria-label": `${word} ${n}` }, n),
  );
  buttons.forEach((button, n) =>
    button.addEventListener("click", () => {
      buttons.forEach((other, k) => other.setAttribute("aria-pressed", k === n ? "true" : "false"));
      chosen(n);
    }),
  );
  return h("div", { class: "chooser", role: "group", "aria-label": word }, h("span", { class: "label" }, word), buttons);
}

/** One rectangle of cells; a small one does not fill the width. */
function cells({ data, start, rows, columns, scale, item, alt }) {
  const wide = (width) => Math.min(width, columns * 36);
  return surface({
    alt,
    height: (width) => Math.min(Math.max((rows * wide(width)) / columns, Math.min(rows * 14, 120), 24), Math.max(220, Math.min(rows * 2, 340)), rows * 36),
    draw(context, width, height) {
      context.clearRect(0, 0, width, height);
      stretch(context, paint(context, data, start, columns, rows, scale, theme()), 0, 0, wide(width), height);
    },
    hover(x, y, width, height) {
      const row = Math.floor((y / height) * rows);
      const column = Math.floor((x / wide(width)) * columns);
      if (row < 0 || row >= rows || column < 0 || column >= columns) return null;
      const place = [
        [item.axes[2], row * item.steps[2]],
        [item.axes[3], column * item.steps[3]],
      ];
      return [show(data[start + row * columns + column]), place.map(([axis, n]) => `${singular(axis)} ${n}`).join(" · ")];
    },
  });
}

/** Feature maps, one beside the other. */
function grid({ data, start, panels, rows, columns, scale, item, alt }) {
  const gap = 6;
  const layout = (width) => {
    const long = rows < columns / 4;
    const steep = Math.min(Math.max(rows / columns, 1 / 12), 4); // what is longer is stretched
    const ideal = columns <= 5 && rows <= 5 ? 40 : long ? Math.min(width, Math.max(96, columns)) : Math.max(steep > 2 ? 24 : 56, Math.min(96, columns * 4));
    const fit = Math.max(1, Math.min(panels, Math.floor((width + gap) / (ideal + gap))));
    const across = Math.ceil(panels / Math.ceil(panels / fit)); // lines of about the same length
    const wide = Math.min((width + gap) / across - gap, Math.max(panels < 4 ? 180 : 128, long ? columns : 0), 320 / steep);
    const tall = wide * steep;
    return { across, wide, tall };
  };
  const find = (x, y, width) => {
    const { across, wide, tall } = layout(width);
    const column = Math.floor(x / (wide + gap));
    const line = Math.floor(y / (tall + gap));
    const panel = line * across + column;
    const inX = (x - column * (wide + gap)) / wide;
    const inY = (y - line * (tall + gap)) / tall;
    if (column >= across || panel >= panels || inX >= 1 || inY >= 1 || inX < 0 || inY < 0) return null;
    return [panel, Math.floor(inY * rows), Math.floor(inX * columns)];
  };
  return surface({
    alt,
    height(width) {
      const { across, tall } = layout(width);
      return Math.ceil(panels / across) * (tall + gap) - gap;
    },
    draw(context, width, height) {
      const { across, wide, tall } = layout(width);
      context.clearRect(0, 0, width, height);
      for (let n = 0; n < panels; n++) {
        const image = paint(context, data, start + n * rows * columns, columns, rows, scale, theme());
        const x = (n % across) * (wide + gap);
        const y = Math.floor(n / across) * (tall + gap);
        stretch(context, image, x, y, wide, tall);
        context.strokeStyle = colour("line");
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, wide - 1, tall - 1);
      }
    },
    hover(x, y, width) {
      const found = find(x, y, width);
      if (!found) return null;
      const [panel, row, column] = found;
      const value = data[start + (panel * rows + row) * columns + column];
      return [show(value), `${singular(item.axes[1])} ${panel * item.steps[1]} · row ${row * item.steps[2]} · column ${column * item.steps[3]}`];
    },
  });
}

/** A vector as bars up and down from 0. */
function bars({ data, start, columns, item, alt }) {
  const values = data.subarray(start, start + columns);
  let [low, high] = [0, 0];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === high) high = 1;
  return surface({
    alt,
    height: () => 120,
    draw(context, width, height) {
      const at = (value) => 4 + ((high - value) / (high - low)) * (height - 8);
      context.clearRect(0, 0, width, height);
      const wide = width / columns;
      for (let n = 0; n < columns; n++) {
        const there = Number.isFinite(values[n]);
        const [a, b] = there ? [at(Math.max(values[n], 0)), at(Math.min(values[n], 0))] : [0, height];
        context.fillStyle = colour(there ? "bar" : "missing");
        context.fillRect(n * wide, a, Math.max(0.6, wide - (wide > 3 ? 1 : 0)), Math.max(1, b - a));
      }
      context.fillStyle = colour("line-strong");
      context.fillRect(0, Math.round(at(0)), width, 1);
    },
    hover(x, y, width) {
      const n = Math.floor((x / width) * columns);
      return n >= 0 && n < columns ? [show(values[n]), `position ${n * item.steps[3]}`] : null;
    },
  });
}
