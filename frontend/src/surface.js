// A canvas that draws itself when it comes into view, again when its width or the theme changes.

import { h, hint } from "./dom.js";

const surfaces = new Set();
let current = "light";
let onPaper = false; // where all is in view

export function theme() {
  return current;
}

/** Light, dark, or null for what the system says; all that is drawn follows. */
export function setTheme(choice) {
  const system = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  current = choice ?? system;
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
  for (const redraw of surfaces) redraw();
}

/** Draw everything light while the page is printed, and as it was afterwards. */
export function drawForPaper(printing) {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && window.matchMedia("(prefers-color-scheme: dark)").matches);
  current = dark && !printing ? "dark" : "light";
  onPaper = printing;
  for (const redraw of surfaces) redraw();
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const resizes = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.redraw?.();
});
const views = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      views.unobserve(entry.target);
      entry.target.seen = true;
      entry.target.redraw();
    }
  },
  { rootMargin: "200px" },
);

/**
 * An element with a canvas. `height(width)` says how high it is, `draw(context, width, height)`
 * draws it, `hover(x, y, width, height)` gives the lines of a hint, or null; `click` as `hover`.
 */
export function surface({ height, draw, alt, hover, click, keys }) {
  const canvas = h("canvas", { role: keys ? "application" : "img", "aria-label": alt, tabindex: keys ? 0 : null });
  const box = h("div", { class: "surface" }, canvas);
  let width = 0;
  let tall = 0;
  const redraw = () => {
    if (!box.isConnected) {
      if (width) forget();
      return;
    }
    width = Math.floor(box.clientWidth);
    if (!width) return;
    tall = Math.max(1, Math.round(height(width)));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
    if (!box.seen && !onPaper) return;
    const dense = Math.min(window.devicePixelRatio || 1, 16000 / Math.max(tall, width));
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(tall * dense);
    const context = canvas.getContext("2d");
    context.setTransform(dense, 0, 0, dense, 0, 0);
    draw(context, width, tall);
  };
  const forget = () => {
    surfaces.delete(redraw);
    resizes.unobserve(box);
    views.unobserve(box);
  };
  box.redraw = redraw;
  surfaces.add(redraw);
  resizes.observe(box);
  views.observe(box);
  const at = (event) => {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top, width, tall];
  };
  if (hover) {
    canvas.addEventListener("pointermove", (event) => hint(hover(...at(event)), event));
    canvas.addEventListener("pointerleave", () => hint(null));
  }
  if (click) {
    canvas.classList.add("clickable");
    canvas.addEventListener("click", (event) => {
      hint(null);
      click(...at(event));
    });
  }
  if (keys) canvas.addEventListener("keydown", keys);
  return box;
}

/** Thin slanting lines over a rectangle: here nothing is known. */
export function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.strokeStyle = colour("line-strong");
  context.lineWidth = 1;
  context.stroke();
  context.restore();
}

/** Paint a small image over a rectangle: large cells stay sharp, small ones are smoothed. */
export function stretch(context, image, x, y, width, height) {
  const small = document.createElement("canvas");
  small.width = image.width;
  small.height = image.height;
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = width < image.width || height < image.height;
  context.imageSmoothingQuality = "high";
  context.drawImage(small, x, y, width, height);
}

export const FONT = '11px ui-sans-serif, system-ui, -apple-system, "Segoe UI", sans-serif';
