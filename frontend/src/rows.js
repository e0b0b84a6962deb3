// The tree as a list of rows: what is unfolded, searched for and filtered.

import { visible } from "./format.js";

/** Children, depth and what else is needed of every module, once. */
export function indexModules(modules, entries) {
  const nodes = modules.map((module, index) => ({
    index,
    path: module.path,
    name: module.path === "" ? "model" : visible(module.path.slice(module.path.lastIndexOf(".") + 1)),
    type: module.type,
    parent: module.parent,
    children: [],
    depth: 0,
    entries: [],
    below: 0, // entries with data in it and below
    module,
  }));
  for (const node of nodes) {
    if (node.parent !== null) {
      nodes[node.parent].children.push(node.index);
      node.depth = nodes[node.parent].depth + 1;
    }
  }
  entries.forEach((entry, n) => nodes[entry.module].entries.push(n));
  for (let n = nodes.length - 1; n >= 0; n--) {
    nodes[n].below += nodes[n].entries.filter((e) => entries[e].chunk).length;
    if (nodes[n].parent !== null) nodes[nodes[n].parent].below += nodes[n].below;
  }
  return nodes;
}

/** Whether a node itself is what is looked for. */
export function fits(node, query) {
  if (query.type && node.type !== query.type) return false;
  if (query.show === "data" && !node.entries.length) return false;
  if (query.show === "uncalled" && node.module.called !== false) return false;
  const text = `${node.path} ${node.type}`.toLowerCase();
  return query.words.every((word) => text.includes(word));
}

export function parseQuery(text, show = "all", type = "") {
  return { words: text.toLowerCase().split(/\s+/).filter(Boolean), show, type };
}

export function isEmpty(query) {
  return !query.words.length && query.show === "all" && !query.type;
}

/** The rows to show, in order: [{node, open, match}]. With a query, what fits and what is above it. */
export function visibleRows(nodes, unfolded, query) {
  const rows = [];
  if (isEmpty(query)) {
    const visit = (node) => {
      const open = node.children.length > 0 && unfolded.has(node.index);
      rows.push({ node, open, match: true });
      if (open) for (const child of node.children) visit(nodes[child]);
    };
    for (const node of nodes) if (node.parent === null) visit(node);
    return { rows, matches: nodes.length };
  }
  const wanted = new Set();
  let matches = 0;
  for (const node of nodes) {
    if (!fits(node, query)) continue;
    matches += 1;
    for (let at = node; at && !wanted.has(at.index); at = at.parent === null ? null : nodes[at.parent]) wanted.add(at.index);
  }
  for (const node of nodes) {
    if (!wanted.has(node.index)) continue;
    rows.push({ node, open: node.children.some((child) => wanted.has(child)), match: fits(node, query) });
  }
  return { rows, matches };
}

/** What is unfolded at first: level by level, as long as the list stays short. */
export function unfoldAtFirst(nodes, most = 60) {
  const unfolded = new Set();
  let level = nodes.filter((node) => node.parent === null);
  let shown = level.length;
  while (level.length) {
    const next = level.flatMap((node) => node.children.map((child) => nodes[child]));
    shown += next.length;
    if (shown > most && unfolded.size) break;
    for (const node of level) if (node.children.length) unfolded.add(node.index);
    level = next;
  }
  return unfolded;
}

/** The types of modules, the most frequent first: [[type, count]]. */
export function countTypes(nodes) {
  const counts = new Map();
  for (const node of nodes) if (node.type) counts.set(node.type, (counts.get(node.type) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
}
