// From the bytes of a chunk to its description and typed arrays.

const KINDS = { f4: Float32Array, f8: Float64Array, u1: Uint8Array, u4: Uint32Array };

let halves = null;

/** The number that each of the 65,536 half floats stands for. */
function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    let value;
    if (exponent === 0) value = fraction * 2 ** -24;
    else if (exponent === 31) value = fraction ? NaN : Infinity;
    else value = (1 + fraction / 1024) * 2 ** (exponent - 15);
    halves[bits] = bits >> 15 ? -value : value;
  }
  return halves;
}

/** A chunk as hookline.view.page.pack wrote it: {meta, arrays: {name: {data, shape}}}. */
export function unpack(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = {};
  for (const [name, [kind, offset, shape]] of Object.entries(header.arrays)) {
    const count = shape.reduce((a, b) => a * b, 1);
    const start = 8 + length + offset;
    if (kind === "f2") {
      const table = halfTable();
      const bits = new Uint16Array(buffer, start, count);
      const data = new Float32Array(count);
      for (let n = 0; n < count; n++) data[n] = table[bits[n]];
      arrays[name] = { data, shape };
    } else {
      arrays[name] = { data: new KINDS[kind](buffer, start, count), shape };
    }
  }
  return { meta: header.meta, arrays };
}

/** The bytes of a text in base64. */
export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text.trim());
  const raw = atob(text.trim());
  const found = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) found[n] = raw.charCodeAt(n);
  return found;
}

export async function gunzip(content) {
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
