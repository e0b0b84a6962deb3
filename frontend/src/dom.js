// Elements are made here, and text only ever becomes text: a module may be called <script>.

import { straight } from "./format.js";

/** An element with properties, attributes, listeners (`onclick`) and children. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") for (const [name, item] of Object.entries(value)) node.style.setProperty(name, item);
    else if (key === "value" || key === "checked") node[key] = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(straight(String(child))));
  }
}

/** Replace what is in an element. */
export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

const PATHS = {
  chevron: "M6 4l4 4-4 4",
  copy: "M5.5 5.5v-2a1 1 0 011-1h6a1 1 0 011 1v6a1 1 0 01-1 1h-2M3.5 5.5h6a1 1 0 011 1v6a1 1 0 01-1 1h-6a1 1 0 01-1-1v-6a1 1 0 011-1z",
  check: "M3 8.5l3.2 3.2L13 5",
  search: "M7 12A5 5 0 107 2a5 5 0 000 10zm3.6-1.4L14 14",
  moon: "M13.5 9.7A6 6 0 016.3 2.5 6 6 0 1013.5 9.7z",
  sun: "M8 10.7a2.7 2.7 0 100-5.4 2.7 2.7 0 000 5.4zM8 1.6v1.5M8 12.9v1.5M1.6 8h1.5M12.9 8h1.5M3.5 3.5l1 1M11.5 11.5l1 1M12.5 3.5l-1 1M4.5 11.5l-1 1",
  menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  close: "M4 4l8 8M12 4l-8 8",
  warning: "M8 2.2l6.2 11.1H1.8zM8 6.4v3.2M8 11.3v.4",
  error: "M8 14A6 6 0 108 2a6 6 0 000 12zM8 4.9v3.8M8 10.7v.4",
  home: "M2.5 7.5L8 2.8l5.5 4.7M4 6.6v6.6h8V6.6",
  up: "M4 10l4-4 4 4",
  down: "M4 6l4 4 4-4",
};

/** A small line drawing; it is decoration, the text beside it says what it means. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** The mark of hookline: a line that ends in a hook. */
export function mark() {
  const svg = icon("menu");
  svg.setAttribute("class", "mark");
  svg.firstChild.setAttribute("d", "M11.5 1.5v8.2a3.6 3.6 0 11-7.2 0V8.2L2.4 10M4.3 8.2L6.2 10");
  return svg;
}

/** Put text on the clipboard, also where the page was opened from a disk. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // No permission, or no secure context: the old way, by a selection.
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** A button that copies a text and says so. */
export function copyButton(text, what) {
  const button = h("button", { class: "quiet copy", type: "button", title: `Copy ${what}`, "aria-label": `Copy ${what}` }, icon("copy"));
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    await copyText(text);
    fill(button, icon("check"));
    button.classList.add("done");
    announce(`Copied ${text}`);
    setTimeout(() => {
      fill(button, icon("copy"));
      button.classList.remove("done");
    }, 1200);
  });
  return button;
}

let teller = null;

/** Tell those who listen to the page instead of looking at it. */
export function announce(text) {
  if (!teller) {
    teller = h("div", { class: "offscreen", role: "status", "aria-live": "polite" });
    document.body.append(teller);
  }
  teller.textContent = text;
}

let tip = null;

/** A small label near the pointer; `lines` is null to hide it. */
export function hint(lines, event) {
  if (!tip) {
    tip = h("div", { class: "tip", "aria-hidden": "true" });
    document.body.append(tip);
  }
  if (!lines) {
    tip.style.display = "none";
    return;
  }
  fill(tip, lines.map((line, n) => h("div", { class: n ? "" : "first" }, line)));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const above = event.clientY + 18 + box.height > window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}
