// Numbers and shapes for people.

/** A number with four digits that count, or more: 0.01234, 1.2e-7, 12,345. */
export function show(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return minus(value.toLocaleString("en-US"));
  if (size >= 1e5 || size < 1e-3) {
    const [base, power] = value.toExponential(digits - 2).split("e");
    return minus(`${Number(base)}e${Number(power)}`);
  }
  const rounded = Number(value.toPrecision(digits));
  return minus(size >= 1000 ? rounded.toLocaleString("en-US", { maximumFractionDigits: 12 }) : String(rounded));
}

/** A number on an axis, with as many digits as tell it from those one step away. */
export function tick(value, step) {
  if (!value || !(step > 0)) return show(value);
  const digits = Math.floor(Math.log10(Math.abs(value) / step)) + 4; // one of them as steps may be 2.5
  return show(value, Math.min(15, Math.max(4, digits)));
}

/** The same with two digits, where there is little room. */
export function brief(value) {
  if (!Number.isFinite(value) || value === 0) return show(value);
  const size = Math.abs(value);
  if (size >= 1e4 || size < 0.01) {
    const [digits, power] = value.toExponential(1).split("e");
    return minus(`${Number(digits)}e${Number(power)}`);
  }
  return minus(String(Number(value.toPrecision(2))));
}

function minus(text) {
  return text.replace(/^-/, "−").replace("e-", "e−");
}

/** A count in little room: 950, 1.2K, 34M. */
export function compact(value) {
  if (value === null || value === undefined) return "";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]]) {
    if (value >= size * 0.9995) {
      const scaled = value / size;
      return `${scaled >= 100 ? Math.round(scaled) : Number(scaled.toPrecision(2))}${letter}`;
    }
  }
  return String(value);
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  if (share === 0 || share === 1) return `${share * 100} %`;
  const value = share * 100;
  if (value < 0.1) return "< 0.1 %";
  if (value > 99.9) return "> 99.9 %";
  return `${Number(value.toPrecision(value < 10 ? 2 : 3))} %`;
}

export function shape(sizes) {
  if (!sizes) return "";
  return sizes.length ? sizes.join(" × ") : "a number";
}

export function bytes(count) {
  const power = Math.min(Math.floor((String(Math.round(count)).length - 1) / 3), 4);
  return `${(count / 1000 ** power).toFixed(Math.min(power, 1))} ${["B", "KB", "MB", "GB", "TB"][power]}`;
}

/** `1 call`, `2 calls`. */
export function plural(count, word) {
  return `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;
}

/** Text whose marks for the direction of writing are written out: in a name they would turn it around. */
export function straight(text) {
  return text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** A name that can be seen: one of blanks only has quotes. */
export function visible(name) {
  return name && !name.trim() ? `'${name}'` : straight(name);
}

/** The end of a long path, which is what tells it from its neighbours. */
export function tail(text, most) {
  return text.length <= most ? text : `…${text.slice(text.length - most + 1)}`;
}
