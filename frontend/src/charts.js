// Curves over steps (uPlot), and maps of layers × steps.

import uPlot from "uplot";
import { announce, h } from "./dom.js";
import { brief, show, tail, tick } from "./format.js";
import { fitScale, paint } from "./scales.js";
import { FONT, colour, hatch, stretch, surface, theme } from "./surface.js";

const WHOLE = Array.from({ length: 46 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3)); // between ticks of steps

/** A chart of one series over steps, {name, steps, values}. `gap(n)` says what stands where no number is. */
export function curve(series, { title, tall = 190, alt, gap = () => "not finite" }) {
  const readout = h("span", { class: "readout" });
  const box = h("div", { class: "curve", role: "img", "aria-label": alt });
  let logged = false;
  const positive = () => series.values.every((value) => !Number.isFinite(value) || value > 0);
  const toggle = h("button", { type: "button", class: "chip", "aria-pressed": "false", title: "A log scale", hidden: !positive() }, "log");
  toggle.addEventListener("click", () => {
    logged = !logged;
    toggle.setAttribute("aria-pressed", String(logged));
    draw();
  });
  const head = h("div", { class: "curve-head" }, title, toggle, readout);
  let plot = null;
  const tell = (n) => {
    const at = n ?? series.steps.length - 1;
    const value = series.values[at];
    readout.textContent = at < 0 ? "" : `${value === null || Number.isNaN(value) ? gap(at) : show(value)} at step ${show(series.steps[at])}`;
  };
  // What is not finite parts the curve and has a mark below it; what was not measured does not.
  const broken = (value, n) => !Number.isFinite(value) && ((value !== null && !Number.isNaN(value)) || gap(n) === "not finite");
  const data = () => [Array.from(series.steps), Array.from(series.values, (value, n) => (Number.isFinite(value) ? value : broken(value, n) ? null : undefined))];
  const alone = (self) => {
    const there = self.data[1].map((value, n) => [value, n]).filter(([value]) => value !== undefined);
    const found = there.filter(([value], n) => value !== null && (there[n - 1]?.[0] ?? null) === null && (there[n + 1]?.[0] ?? null) === null);
    return found.length ? found.map(([, n]) => n) : null;
  };
  const marks = (self) => {
    const { top, height } = self.bbox;
    const [wide, tall] = [2, 7].map((size) => size * devicePixelRatio);
    self.ctx.fillStyle = colour("missing");
    self.data[1].forEach((value, n) => value === null && self.ctx.fillRect(self.valToPos(self.data[0][n], "x", true) - wide / 2, top + height - tall, wide, tall));
  };
  const draw = () => {
    plot?.destroy();
    plot = null;
    if (!box.clientWidth) return;
    const log = logged && positive();
    const words = (_, values, __, ___, step) => values.map((value) => (value === null ? "" : tick(value, log ? 0 : step)));
    const room = (_, values) => Math.max(58, 14 + 6.4 * Math.max(0, ...(values ?? []).map((text) => text.length)));
    const axis = { stroke: colour("muted"), font: FONT, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, values: words };
    plot = new uPlot(
      {
        width: box.clientWidth,
        height: tall,
        scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
        legend: { show: false },
        cursor: { points: { size: 7 }, drag: { x: true, y: false } },
        padding: [8, 10, 0, 0],
        axes: [
          { ...axis, size: 26, gap: 6, incrs: WHOLE },
          { ...axis, size: room, gap: 6 },
        ],
        series: [{}, { stroke: colour("series-0"), width: 1.6, points: { show: series.steps.length < 3, filter: (self, _, shown) => (shown ? null : alone(self)) } }],
        hooks: { draw: [marks], setCursor: [(self) => tell(self.cursor.idx)] },
      },
      data(),
      box,
    );
  };
  tell(null);
  watch(box, draw);
  const whole = h("div", {}, head, box);
  whole.update = (next) => {
    series = next;
    toggle.hidden = !positive();
    if (logged && !positive()) draw();
    else plot?.setData(data());
    tell(null);
  };
  return whole;
}

const drawn = new Set();

/** Redraw with the width; `redrawCurves` is for the theme. */
function watch(box, draw) {
  let last = 0;
  const observer = new ResizeObserver(() => {
    if (!box.isConnected) {
      if (last) {
        observer.disconnect();
        drawn.delete(draw);
      }
      return;
    }
    if (box.clientWidth === last) return;
    last = box.clientWidth;
    draw();
  });
  observer.observe(box);
  drawn.add(draw);
}

export function redrawCurves() {
  for (const draw of drawn) draw();
}

/**
 * A map of places × steps: one row a place, hatched where nothing was measured. `chosen(row, column)`
 * is called for a click or Enter; the arrows move a cursor over the cells.
 */
export function heatmap({ labels, steps, data, measured, chosen, signed, statistic, alt }) {
  const rows = labels.length;
  const columns = steps.length;
  const scale = fitScale(data, { signed, log: !signed });
  const tall = rows > 60 ? Math.max(6, Math.min(10, 900 / rows)) : Math.max(12, Math.min(22, 420 / rows));
  const foot = 20;
  const cursor = { row: 0, column: columns - 1, shown: false };
  const longest = labels.reduce((most, label) => Math.max(most, label.length), 0);
  const gutter = (width) => Math.min(longest * 6.6 + 16, Math.max(90, width * 0.26));
  const find = (x, y, width) => {
    const left = gutter(width);
    const row = Math.floor(y / tall);
    const column = Math.floor(((x - left) / (width - left)) * columns);
    if (row < 0 || row >= rows) return null;
    return [row, Math.max(0, Math.min(columns - 1, column)), x >= left];
  };
  const word = (n) => (!measured[n] ? "not measured" : Number.isNaN(data[n]) ? "not finite" : show(data[n]));
  const say = (row, column) => [labels[row], `step ${steps[column].toLocaleString("en-US")}`, `${statistic} ${word(row * columns + column)}`];
  const box = surface({
    alt,
    height: () => rows * tall + foot,
    draw(context, width) {
      const left = gutter(width);
      context.clearRect(0, 0, width, rows * tall + foot);
      hatch(context, left, 0, width - left, rows * tall);
      stretch(context, paint(context, data, 0, columns, rows, scale, theme(), measured), left, 0, width - left, rows * tall);
      context.font = FONT;
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      context.textBaseline = "middle";
      const every = Math.max(1, Math.ceil(12 / tall));
      for (let row = 0; row < rows; row += every) {
        let most = 34;
        let text = tail(labels[row], most);
        while (most > 6 && context.measureText(text).width > left - 10) text = tail(labels[row], (most -= 2));
        context.fillText(text, left - 8, row * tall + (tall * Math.min(every, rows - row)) / 2 / (every > 1 ? every : 1));
      }
      context.textBaseline = "top";
      context.textAlign = "center";
      const apart = Math.max(1, Math.ceil((columns * 110) / (width - left))); // as many columns as a label needs
      for (let column = 0; column < columns; column += apart) {
        const text = show(steps[column]);
        const half = context.measureText(text).width / 2;
        const middle = left + ((column + 0.5) / columns) * (width - left); // of the column it names
        context.fillText(text, Math.min(Math.max(middle, left + half), width - half), rows * tall + 6);
      }
      if (cursor.shown) {
        const wide = (width - left) / columns;
        context.strokeStyle = colour("accent");
        context.lineWidth = 2;
        context.strokeRect(left + cursor.column * wide - 1, cursor.row * tall - 1, Math.max(wide, 4) + 2, tall + 2);
      }
    },
    hover(x, y, width) {
      const found = find(x, y, width);
      return found ? say(found[0], found[1]) : null;
    },
    click(x, y, width) {
      const found = find(x, y, width);
      if (found) chosen(found[0], found[2] ? found[1] : null);
    },
    keys(event) {
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      if (event.key === "Enter") return chosen(cursor.row, cursor.column);
      if (!moves[event.key]) return undefined;
      event.preventDefault();
      event.stopPropagation();
      cursor.row = Math.max(0, Math.min(rows - 1, cursor.row + moves[event.key][0]));
      cursor.column = Math.max(0, Math.min(columns - 1, cursor.column + moves[event.key][1]));
      cursor.shown = true;
      box.redraw();
      announce(say(cursor.row, cursor.column).join(", "));
      return undefined;
    },
  });
  return { box, scale };
}

/** What a number is along the layers: one or two marks a place, on a log axis where it helps. */
export function profile({ labels, series, chosen, alt }) {
  const all = series.flatMap((one) => one.values).filter((value) => Number.isFinite(value) && value > 0);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const log = high / low > 20;
  const f = (value) => (log ? Math.log10(value) : value);
  const zeros = log && series.some((one) => one.values.includes(0)); // they stand below the axis
  const drawn = (value) => Number.isFinite(value) && (value > 0 || (value === 0 && !log));
  const [a, b] = log ? [Math.floor(f(low) - 0.05), Math.ceil(f(high) + 0.05)] : [0, high * 1.05];
  const pad = { left: 52, right: 8, top: 10, bottom: 8 + (zeros ? 8 : 0) };
  const count = labels.length;
  const at = (n, width) => pad.left + ((n + 0.5) / count) * (width - pad.left - pad.right);
  const nearest = (x, width) => {
    const n = Math.floor(((x - pad.left) / (width - pad.left - pad.right)) * count);
    return n >= 0 && n < count ? n : null;
  };
  return surface({
    alt,
    height: () => 190,
    draw(context, width, height) {
      context.clearRect(0, 0, width, height);
      const y = (value) => pad.top + ((b - f(value)) / (b - a)) * (height - pad.top - pad.bottom);
      context.font = FONT;
      context.textAlign = "right";
      context.textBaseline = "middle";
      const step = Math.max(1, Math.ceil((b - a) / 5));
      const lines = log ? Array.from({ length: Math.floor((b - a) / step) + 1 }, (_, n) => 10 ** (a + n * step)) : [0, 0.25, 0.5, 0.75, 1].map((s) => s * b);
      for (const value of lines) {
        context.fillStyle = colour("line");
        context.fillRect(pad.left, Math.round(y(value)), width - pad.left - pad.right, 1);
        context.fillStyle = colour("muted");
        context.fillText(brief(value), pad.left - 8, y(value));
      }
      series.forEach((one, k) => {
        const ink = colour(`series-${k}`);
        context.strokeStyle = ink;
        context.fillStyle = ink;
        context.lineWidth = 1.5;
        context.beginPath();
        let pen = false;
        one.values.forEach((value, n) => {
          if (!drawn(value)) {
            pen &&= value !== 0; // on a log axis a 0 has no height
            return;
          }
          if (pen) context.lineTo(at(n, width), y(value));
          else context.moveTo(at(n, width), y(value));
          pen = true;
        });
        context.stroke();
        one.values.forEach((value, n) => {
          const zero = log && value === 0;
          if (!zero && (count > 150 || !drawn(value))) return;
          context.beginPath();
          context.arc(at(n, width), zero ? height - pad.bottom + 4 : y(value), 2.6, 0, 7);
          if (zero) context.stroke();
          else context.fill();
        });
      });
    },
    hover(x, y, width) {
      const n = nearest(x, width);
      return n === null ? null : [labels[n], ...series.map((one) => `${one.name} ${show(one.values[n])}`)];
    },
    click(x, y, width) {
      const n = nearest(x, width);
      if (n !== null) chosen(n);
    },
  });
}
