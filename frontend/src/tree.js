// The module tree: only the rows in view exist, so that thousands of modules scroll smoothly.

import { h, icon } from "./dom.js";
import { costsIn } from "./costs.js";
import { plural } from "./format.js";
import { countTypes, isEmpty, parseQuery, unfoldAtFirst, visibleRows } from "./rows.js";

const ROW = 30;

export class Tree {
  /** `chosen(index)` is called when a module is chosen, with its index. */
  constructor(nodes, chosen) {
    this.nodes = nodes;
    this.chosen = chosen;
    this.unfolded = unfoldAtFirst(nodes);
    this.selected = null;
    this.made = new Map(); // the rows that exist, by module
    this.cursor = 0;
    this.show = "all";
    this.type = "";
    this.costs = costsIn(nodes);
    this.unit = this.costs[0] ?? null;
    this.build();
    this.refresh();
  }

  build() {
    this.search = h("input", {
      type: "search",
      placeholder: "Search modules",
      "aria-label": "Search modules by path or type",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.refresh(true),
      onkeydown: (event) => this.inSearch(event),
    });
    this.counter = h("span", { class: "counter", role: "status" });
    this.rows = h("div", { class: "rows", role: "presentation" });
    this.list = h(
      "div",
      { class: "tree", role: "tree", tabindex: 0, "aria-label": "Modules", onscroll: () => this.paint(), onkeydown: (event) => this.key(event) },
      this.rows,
    );
    this.list.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.paint()).observe(this.list);
    this.element = h(
      "div",
      { class: "finder" },
      h("div", { class: "searching" }, icon("search"), this.search, h("kbd", { "aria-hidden": "true" }, "/")),
      this.filters(),
      h("div", { class: "heading" }, this.counter, this.units()),
      this.list,
    );
  }

  /** Which numbers stand beside the modules. */
  units() {
    if (this.costs.length < 2) return h("span", { class: "unit" }, this.unit?.title);
    return h(
      "select",
      { class: "unit", "aria-label": "Numbers beside the modules", onchange: (event) => ((this.unit = this.costs[event.target.value]), this.refresh()) },
      this.costs.map((cost, n) => h("option", { value: n }, cost.title)),
    );
  }

  filters() {
    const kinds = [["all", "All"]];
    if (this.nodes.some((node) => node.entries.length)) kinds.push(["data", "With data"]);
    const uncalled = this.nodes.filter((node) => node.module.called === false).length;
    if (uncalled) kinds.push(["uncalled", `Never called · ${uncalled}`]);
    const chips = kinds.map(([key, text]) => h("button", { type: "button", class: "chip", "data-show": key, "aria-pressed": key === "all" ? "true" : "false" }, text));
    for (const chip of chips) {
      chip.addEventListener("click", () => {
        this.show = chip.dataset.show;
        for (const other of chips) other.setAttribute("aria-pressed", other === chip ? "true" : "false");
        this.refresh(true);
      });
    }
    const types = countTypes(this.nodes);
    const choice = h(
      "select",
      { class: "chip", "aria-label": "Type of module", onchange: (event) => ((this.type = event.target.value), this.refresh(true)) },
      h("option", { value: "" }, "Any type"),
      types.map(([type, count]) => h("option", { value: type }, `${type} · ${count}`)),
    );
    return h("div", { class: "filters", role: "group", "aria-label": "Filters" }, chips, types.length > 1 ? choice : null);
  }

  /** Take new modules, as a live run brings them; what was unfolded stays. */
  replace(nodes) {
    const known = this.nodes.length;
    this.nodes = nodes;
    if (nodes.length !== known) this.unfolded = unfoldAtFirst(nodes);
    this.refresh();
  }

  refresh(top = false) {
    this.query = parseQuery(this.search.value, this.show, this.type);
    const { rows, matches } = visibleRows(this.nodes, this.unfolded, this.query);
    this.visible = rows;
    this.counter.textContent = isEmpty(this.query) ? this.total() : matches ? plural(matches, "match").replace("matchs", "matches") : "Nothing matches";
    this.rows.style.height = `${rows.length * ROW}px`;
    if (top) {
      this.list.scrollTop = 0;
      this.cursor = Math.max(0, rows.findIndex((row) => row.match));
    }
    this.cursor = Math.min(this.cursor, Math.max(0, rows.length - 1));
    this.painted = null;
    this.paint();
  }

  /** How much there is: modules, or places where no module is known, as in a store. */
  total() {
    if (this.nodes.some((node) => node.type)) return plural(this.nodes.length, "module");
    return plural(this.nodes.reduce((count, node) => count + node.entries.length, 0), "place");
  }

  paint() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 8);
    const last = Math.min(this.visible.length, Math.ceil((this.list.scrollTop + (this.list.clientHeight || 600)) / ROW) + 8);
    const key = `${first} ${last} ${this.cursor} ${this.selected}`;
    if (key === this.painted) return;
    this.painted = key;
    // Rows that stay in view stay as they are: only those that come in are made.
    const kept = new Map();
    for (let n = first; n < last; n++) {
      const row = this.visible[n];
      const state = `${n} ${row.open} ${row.match} ${n === this.cursor} ${row.node.index === this.selected} ${this.unit?.key}`;
      const old = this.made.get(row.node.index);
      const same = old && old.state === state && old.node === row.node;
      kept.set(row.node.index, same ? old : { state, node: row.node, element: this.row(row, n) });
    }
    for (const [index, { element }] of this.made) if (kept.get(index)?.element !== element) element.remove();
    let next = this.rows.firstChild;
    for (const { element } of kept.values()) {
      if (element === next) next = next.nextSibling;
      else this.rows.insertBefore(element, next);
    }
    this.made = kept;
    if (this.visible.length) this.list.setAttribute("aria-activedescendant", `row-${this.visible[this.cursor].node.index}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  row({ node, open, match }, position) {
    const { module } = node;
    const cost = this.unit ? (module[this.unit.key] ?? null) : null;
    const flags = [
      "row",
      node.index === this.selected ? "selected" : "",
      position === this.cursor ? "cursor" : "",
      match ? "" : "above",
      module.called === false ? "uncalled" : "",
      node.below ? "" : "bare",
    ];
    const title = module.called === false ? `${node.path}: never called. ${module.reason || ""}` : node.path || "the model itself";
    return h(
      "div",
      {
        class: flags.filter(Boolean).join(" "),
        id: `row-${node.index}`,
        role: "treeitem",
        title,
        "data-index": node.index,
        "aria-level": node.depth + 1,
        "aria-selected": node.index === this.selected ? "true" : "false",
        "aria-expanded": node.children.length ? String(open) : null,
        style: { top: `${position * ROW}px`, "padding-left": `${8 + Math.min(node.depth, 12) * 14}px` },
      },
      h("span", { class: node.children.length ? `fold${open ? " open" : ""}` : "fold none" }, node.children.length ? icon("chevron") : null),
      h("span", { class: "name" }, node.name),
      h("span", { class: "type" }, node.type),
      module.called === false ? h("span", { class: "flag" }, "not called") : null,
      cost !== null
        ? h("span", { class: "cost" }, h("i", { style: { width: `${(100 * cost) / this.unit.most}%` } }), h("b", {}, cost ? this.unit.show(cost) : ""))
        : null,
    );
  }

  click(event) {
    const row = event.target.closest?.(".row");
    if (!row) return;
    const index = Number(row.dataset.index);
    this.cursor = this.visible.findIndex(({ node }) => node.index === index);
    if (event.target.closest(".fold") && this.nodes[index].children.length) this.toggle(index);
    else this.chosen(index);
  }

  toggle(index, open = !this.unfolded.has(index)) {
    if (open) this.unfolded.add(index);
    else this.unfolded.delete(index);
    this.refresh();
  }

  inSearch(event) {
    if (event.key === "Escape") {
      if (this.search.value) {
        this.search.value = "";
        this.refresh(true);
      } else this.search.blur();
      event.stopPropagation();
    } else if (event.key === "Enter") {
      const found = this.visible.find((row) => row.match);
      if (found) this.chosen(found.node.index);
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      this.list.focus();
    }
  }

  key(event) {
    const row = this.visible[this.cursor];
    if (!row) return;
    const { node, open } = row;
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
    if (event.key in moves) this.moveTo(this.cursor + moves[event.key]);
    else if (event.key === "ArrowRight") {
      if (node.children.length && !open) this.toggle(node.index, true);
      else if (node.children.length) this.moveTo(this.cursor + 1);
    } else if (event.key === "ArrowLeft") {
      if (open && isEmpty(this.query)) this.toggle(node.index, false);
      else if (node.parent !== null) this.moveTo(this.visible.findIndex((other) => other.node.index === node.parent));
    } else if (event.key === "Enter" || event.key === " ") this.chosen(node.index);
    else return;
    event.preventDefault();
  }

  moveTo(position) {
    this.cursor = Math.max(0, Math.min(this.visible.length - 1, position));
    this.reveal(this.cursor);
    this.paint();
  }

  /** The module before or behind the chosen one, among the rows that fit. */
  step(by) {
    const rows = this.visible;
    let at = rows.findIndex(({ node }) => node.index === this.selected);
    if (at < 0) at = by > 0 ? -1 : rows.length;
    for (at += by; at >= 0 && at < rows.length; at += by) {
      if (rows[at].match) {
        this.selected = rows[at].node.index; // at once: the next key may come before the page follows
        this.chosen(this.selected);
        return;
      }
    }
  }

  /** Mark a module as chosen, and make it visible. */
  select(index) {
    this.selected = index;
    if (index !== null) {
      if (isEmpty(this.query)) {
        let changed = false;
        for (let at = this.nodes[index].parent; at !== null; at = this.nodes[at].parent) {
          if (!this.unfolded.has(at)) {
            this.unfolded.add(at);
            changed = true;
          }
        }
        if (changed) this.refresh();
      }
      const position = this.visible.findIndex(({ node }) => node.index === index);
      if (position >= 0) {
        this.cursor = position;
        this.reveal(position);
      }
    }
    this.painted = null;
    this.paint();
  }

  /** Scroll to a row; one that is far away comes to the middle. */
  reveal(position) {
    const top = position * ROW;
    const { scrollTop, clientHeight } = this.list;
    if (top >= scrollTop && top + ROW <= scrollTop + clientHeight) return;
    const near = top > scrollTop - 3 * ROW && top < scrollTop + clientHeight + 3 * ROW;
    this.list.scrollTop = !near ? top - clientHeight / 2 : top < scrollTop ? top : top + ROW - clientHeight;
  }
}
