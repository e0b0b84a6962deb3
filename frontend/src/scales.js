// From numbers to colours that people with any colour vision can tell apart.

const STOPS = {
  // Light and dark follow the page: what is nothing looks like the page itself.
  light: {
    sequential: ["#f4f6f6", "#c5dfe0", "#83bfc6", "#4597ab", "#216a8f", "#173f6b", "#140f3a"],
    diverging: ["#0d3b66", "#2a72a8", "#86b6d6", "#f5f4f1", "#eeb183", "#c9651f", "#7c2d0a"],
  },
  dark: {
    sequential: ["#1b2024", "#173b57", "#1a6178", "#2a8a8c", "#5cb592", "#acd98f", "#f5f5a6"],
    diverging: ["#8cc8f2", "#3f8cc4", "#1f4f7a", "#1f2428", "#7a3a14", "#cc6a25", "#f8b878"],
  },
};

export const MISSING = { light: [214, 40, 110], dark: [232, 74, 140] };

const tables = new Map();

/** 256 colours as RGB triples, one behind the other. */
export function colours(theme, kind) {
  const key = `${theme} ${kind}`;
  if (!tables.has(key)) {
    const stops = STOPS[theme][kind].map((text) => [1, 3, 5].map((n) => parseInt(text.slice(n, n + 2), 16)));
    const table = new Uint8Array(768);
    for (let n = 0; n < 256; n++) {
      const at = (n / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      for (let c = 0; c < 3; c++) table[3 * n + c] = Math.round(stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (at - low));
    }
    tables.set(key, table);
  }
  return tables.get(key);
}

/** Values at shares of the sorted finite numbers; of many, a part is sorted. */
export function quantiles(data, shares) {
  const step = Math.max(1, Math.floor(data.length / 20000));
  const kept = [];
  for (let n = 0; n < data.length; n += step) if (Number.isFinite(data[n])) kept.push(data[n]);
  kept.sort((a, b) => a - b);
  return shares.map((share) => (kept.length ? kept[Math.round(share * (kept.length - 1))] : 0));
}

/** How numbers become colours: {kind, low, high, log, position(value)}; position is 0 to 255, or -1. */
export function fitScale(data, { signed = null, log = false } = {}) {
  let [least, low, high, most] = quantiles(data, [0, 0.005, 0.995, 1]);
  if (low === high) [low, high] = [least, most];
  const both = signed ?? (low < 0 && high > 0);
  if (both) {
    const bound = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return finish("diverging", -bound, bound, false);
  }
  if (log && high > 0) {
    const positive = Array.from(data).filter((x) => x > 0 && Number.isFinite(x));
    const [bottom] = quantiles(positive, [0.01]);
    if (bottom > 0 && high / bottom > 50) return finish("sequential", Math.max(bottom, high * 1e-9), high, true);
  }
  if (low > 0 && low < 0.6 * high) low = 0;
  if (high < 0) [low, high] = [low, Math.max(high, 0)];
  if (low === high) high = low + (Math.abs(low) || 1);
  return finish("sequential", low, high, false);
}

function finish(kind, low, high, log) {
  const [a, b] = log ? [Math.log(low), Math.log(high)] : [low, high];
  const position = (value) => {
    if (!Number.isFinite(value)) return -1;
    const at = log ? (value <= 0 ? 0 : (Math.log(value) - a) / (b - a)) : (value - a) / (b - a);
    return at <= 0 ? 0 : at >= 1 ? 255 : Math.round(at * 255);
  };
  return { kind, low, high, log, position };
}

/** Paint numbers into an image: width × height, row by row from `start`; what was not `measured` stays clear. */
export function paint(context, data, start, width, height, scale, theme, measured = null) {
  const image = context.createImageData(width, height);
  const table = colours(theme, scale.kind);
  for (let n = 0; n < width * height; n++) {
    const position = scale.position(data[start + n]);
    const [r, g, b] = position < 0 ? MISSING[theme] : [table[3 * position], table[3 * position + 1], table[3 * position + 2]];
    image.data[4 * n] = r;
    image.data[4 * n + 1] = g;
    image.data[4 * n + 2] = b;
    image.data[4 * n + 3] = measured && !measured[start + n] ? 0 : 255;
  }
  return image;
}

/** Round numbers between two bounds, for the ticks of an axis. */
export function ticks(low, high, about = 4) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const first = Math.ceil(low / step) * step;
  const all = Array.from({ length: about + 2 }, (_, n) => first + n * step); // of large numbers, neighbours may be the same
  return [...new Set(all)].filter((at) => at <= high + step * 1e-6).map((at) => (Math.abs(at) < step * 1e-6 ? 0 : at));
}
