// What the page shows is in its address: #place=conv1&call=2, so that a link leads there.

export function readRoute(hash) {
  const found = {};
  for (const piece of hash.replace(/^#/, "").split("&")) {
    const [key, ...rest] = piece.split("=");
    if (!key) continue;
    try {
      found[key] = decodeURIComponent(rest.join("="));
    } catch {
      found[key] = rest.join("="); // a lone % that somebody typed
    }
  }
  return found;
}

export function writeRoute(route) {
  const pieces = Object.entries(route)
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([key, value]) => `${key}=${encodeURIComponent(value)}`);
  return pieces.length ? `#${pieces.join("&")}` : "#";
}
