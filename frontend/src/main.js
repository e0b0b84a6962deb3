// The page: header, tree, and what is chosen in it.

import { redrawCurves } from "./charts.js";
import { announce, fill, h, icon, mark } from "./dom.js";
import { overview } from "./overview.js";
import { placeView } from "./place.js";
import { readRoute, writeRoute } from "./route.js";
import { indexModules } from "./rows.js";
import { FileSource, LiveSource } from "./sources.js";
import { drawForPaper, setTheme, theme } from "./surface.js";
import { Tree } from "./tree.js";

class App {
  constructor(source, names) {
    this.source = source;
    this.names = names;
    this.choices = {};
    this.logged = false;
    this.failed = (error) => this.complain(error);
  }

  async start() {
    this.page = await this.source.page().catch((error) => this.unreadable(error));
    this.index();
    this.tree = new Tree(this.nodes, (index) => this.open(this.nodes[index].module.place));
    this.main = h("main", { tabindex: -1, id: "main" });
    this.layout();
    window.addEventListener("hashchange", () => this.show());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      if (document.documentElement.dataset.theme) return; // chosen by hand
      setTheme(null);
      redrawCurves();
      this.paintSwitch();
    });
    document.addEventListener("keydown", (event) => this.key(event));
    window.matchMedia("print").addEventListener("change", ({ matches }) => {
      drawForPaper(matches);
      redrawCurves();
    });
    this.show();
    if (this.page.trouble) this.tryAgain();
    else if (this.source.live) this.listen();
    document.documentElement.dataset.ready = "true";
  }

  /** The page of a folder that cannot be read: it says why, and the others stay within reach. */
  unreadable(trouble) {
    if (!this.source.live) throw trouble;
    return { title: this.source.name, subtitle: "", trouble, facts: [], findings: [], modules: [], entries: [] };
  }

  /** It may be half written yet, or be mended. */
  async tryAgain() {
    const readable = () => this.source.page().then(() => true, () => false);
    do await new Promise((done) => setTimeout(done, 3000));
    while (!(await readable()));
    location.reload();
  }

  listen() {
    this.source.listen(this.page.revision, (update) => this.updated(update).catch(this.failed), (up) => this.reached(up));
  }

  index() {
    this.nodes = indexModules(this.page.modules, this.page.entries);
    this.modulesByPlace = new Map(this.page.modules.map((module, n) => [module.place, n]));
    this.entriesByPlace = new Map(this.page.entries.map((entry, n) => [entry.place, n]));
  }

  chunk(id) {
    return this.source.chunk(id);
  }

  hasPlace(place) {
    return this.modulesByPlace.has(place) || this.entriesByPlace.has(place);
  }

  /** The module that a place belongs to. */
  moduleOf(place) {
    if (this.modulesByPlace.has(place)) return this.modulesByPlace.get(place);
    const entry = this.entriesByPlace.get(place);
    return entry === undefined ? null : this.page.entries[entry].module;
  }

  link(place, step) {
    return writeRoute({ source: this.names.length > 1 ? this.source.name : undefined, place, step });
  }

  open(place, step) {
    const target = this.link(place, step);
    if (location.hash === target) this.show();
    else location.hash = target;
  }

  /** Keep something in the address without a new entry in the history. */
  remember(changes) {
    this.route = { ...this.route, ...changes };
    history.replaceState(null, "", writeRoute(this.route));
  }

  layout() {
    const { page } = this;
    this.status = h("span", { class: "status", role: "status" });
    this.chooser = h("select", { class: "chip", "aria-label": "What is shown", onchange: (event) => this.turnTo(event.target.value) });
    this.paintChooser();
    this.switch = h("button", { type: "button", class: "quiet", onclick: () => this.switchTheme() });
    this.sidebar = h("aside", { class: "sidebar", "aria-label": "Modules" }, h("a", { class: "to-overview", href: this.link(undefined) }, icon("home"), "Overview"), this.tree.element);
    const menu = h("button", { type: "button", class: "quiet menu", "aria-label": "Modules", "aria-expanded": "false", onclick: () => this.drawer() }, icon("menu"));
    this.menu = menu;
    this.title = h("span", { class: "name" }, page.title);
    this.subtitle = h("span", { class: "subtitle" }, page.subtitle);
    fill(
      document.getElementById("app"),
      h("a", { class: "skip", href: "#main", onclick: (event) => (event.preventDefault(), this.main.focus()) }, "Skip to the content"),
      h("header", { class: "top" }, menu, h("a", { class: "brand", href: this.link(undefined), "aria-label": "hookline, overview" }, mark()), this.title, this.subtitle, h("span", { class: "grow" }), this.chooser, this.status, h("button", { type: "button", class: "quiet keys", title: "Keys (?)", "aria-label": "Keys", onclick: () => this.help() }, "?"), this.switch),
      h("div", { class: "columns" }, this.sidebar, this.main),
    );
    document.title = `${page.title} · hookline`;
    this.paintSwitch();
  }

  /** The runs, stores and reports of the folder, if there are several. */
  paintChooser() {
    this.chooser.hidden = this.names.length < 2;
    fill(this.chooser, this.names.map((one) => h("option", { value: one.name, selected: one.name === this.source.name }, `${one.name} · ${one.kind}`)));
  }

  drawer(open = !this.sidebar.classList.contains("open")) {
    this.sidebar.classList.toggle("open", open);
    this.menu.setAttribute("aria-expanded", String(open));
    fill(this.menu, icon(open ? "close" : "menu"));
  }

  switchTheme() {
    setTheme(theme() === "dark" ? "light" : "dark");
    redrawCurves();
    this.paintSwitch();
    try {
      localStorage.setItem("hookline-theme", theme());
    } catch {
      // A page from a disk may not keep anything; then the choice lasts as long as the page.
    }
  }

  switchLog() {
    this.logged = !this.logged;
    const top = this.main.scrollTop;
    this.show();
    this.main.scrollTop = top;
  }

  paintSwitch() {
    const dark = theme() === "dark";
    fill(this.switch, icon(dark ? "sun" : "moon"));
    this.switch.setAttribute("aria-label", dark ? "Light colours" : "Dark colours");
    this.switch.title = dark ? "Light colours" : "Dark colours";
  }

  turnTo(name) {
    this.source.close();
    const chosen = this.names.find((one) => one.name === name);
    if (chosen?.address) location.href = chosen.address;
    else {
      location.hash = writeRoute({ source: name });
      location.reload();
    }
  }

  /** Show what the address says. */
  show() {
    this.route = readRoute(location.hash);
    if (this.names.length > 1 && this.route.source && this.route.source !== this.source.name) {
      location.reload();
      return;
    }
    if (this.page.trouble) {
      fill(this.main);
      this.complain(this.page.trouble);
      return;
    }
    this.onScalars = this.onSteps = null;
    this.findingsShown = this.page.run?.findings;
    const { place } = this.route;
    const index = place === undefined ? null : this.moduleOf(place);
    this.tree.select(index);
    if (index !== null) fill(this.main, placeView(this, index, place));
    else if (place !== undefined) fill(this.main, h("div", { class: "overview" }, h("p", { class: "empty" }, `There is no place ${place} on this page.`), overview(this)));
    else fill(this.main, overview(this));
    this.main.scrollTop = 0;
    this.drawer(false);
    if (index !== null) announce(`${this.nodes[index].path || "the model"}, ${this.nodes[index].type}`);
  }

  /** The server says that something was appended. */
  async updated(update) {
    const { page } = this;
    if (update.sources.length !== this.names.length) {
      this.names = update.sources;
      this.paintChooser();
    }
    document.documentElement.dataset.revision = update.revision;
    if (update.restructured) {
      this.page = await this.source.page();
      this.index();
      this.tree.replace(this.nodes);
      this.title.textContent = this.page.title;
      this.subtitle.textContent = this.page.subtitle;
      this.show();
      return;
    }
    Object.assign(page, { facts: update.facts, findings: update.findings, subtitle: update.subtitle });
    Object.assign(page.run, update.run);
    this.subtitle.textContent = update.subtitle;
    const top = this.main.scrollTop;
    if (this.route.place === undefined) {
      const facts = this.main.querySelector(".facts");
      if (facts && this.onScalars && update.run.findings === this.findingsShown && update.run.scalars.length) {
        fill(facts, page.facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
        this.onScalars(update.scalars);
        this.onSteps?.();
      } else this.show();
      this.findingsShown = update.run.findings;
    } else this.main.querySelectorAll(".card").forEach((card) => card.draw?.());
    this.main.scrollTop = top;
  }

  reached(up) {
    this.status.className = `status ${up ? "up" : "down"}`;
    this.status.textContent = up ? "live" : "not reached";
  }

  complain(error) {
    announce(`This could not be read: ${error.message}`);
    this.main.prepend(h("p", { class: "trouble" }, `This could not be read: ${error.message}`));
  }

  key(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range";
    if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
    if (event.key === "/") {
      event.preventDefault();
      if (getComputedStyle(this.menu).display !== "none") this.drawer(true);
      this.tree.search.focus();
      this.tree.search.select();
    } else if (event.key === "j") this.tree.step(1);
    else if (event.key === "k") this.tree.step(-1);
    else if (event.key === "t") this.switchTheme();
    else if (event.key === "l") this.switchLog();
    else if (event.key === "?") this.help();
    else if (event.key === "Escape") {
      if (this.sidebar.classList.contains("open")) this.drawer(false);
      else if (this.route.place !== undefined && !document.querySelector("dialog[open]")) location.hash = this.link(undefined);
    }
  }

  help() {
    const keys = [
      ["/", "search modules"],
      ["j  k", "next module, module before"],
      ["↑ ↓ ← →", "move in the tree, fold and unfold"],
      ["Enter", "show the module"],
      ["Esc", "back to the overview"],
      ["t", "light or dark"],
      ["l", "counts on a log scale"],
    ];
    const dialog = h(
      "dialog",
      { "aria-label": "Keys", onclose: () => dialog.remove(), onclick: (event) => event.target === dialog && dialog.close() },
      h("h2", {}, "Keys"),
      h("dl", {}, keys.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)))),
      h("button", { class: "chip", type: "button", onclick: () => dialog.close() }, "Close"),
    );
    document.body.append(dialog);
    dialog.showModal();
  }
}

function firstTheme() {
  try {
    return localStorage.getItem("hookline-theme");
  } catch {
    return null; // from a disk, some browsers keep nothing
  }
}

async function main() {
  setTheme(firstTheme());
  if (FileSource.here()) return new App(new FileSource(), []).start();
  let names = await LiveSource.names();
  while (!names.length) {
    fill(document.getElementById("app"), h("p", { class: "loading", role: "status" }, "There is no run, store or report in this folder yet. This page waits for one."));
    await new Promise((done) => setTimeout(done, 1000));
    names = await LiveSource.names();
  }
  const wanted = readRoute(location.hash).source;
  const chosen = names.find((one) => one.name === wanted) ?? names.find((one) => one.kind !== "report") ?? names[0];
  if (chosen.kind === "report") {
    location.href = chosen.address;
    return undefined;
  }
  return new App(new LiveSource(chosen.name), names).start();
}

main().catch((error) => {
  fill(document.getElementById("app"), h("p", { class: "loading" }, `This page could not be shown: ${error.message}`));
});
