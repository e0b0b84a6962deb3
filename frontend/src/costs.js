// What modules cost, where it is known: parameters, FLOPs, activations.

import { bytes, compact } from "./format.js";

const COSTS = [
  { key: "parameters", title: "parameters", show: compact },
  { key: "flops", title: "FLOPs", show: compact },
  { key: "activation_bytes", title: "activations", show: bytes },
];

/** The costs that are known of some module, each with the largest. */
export function costsIn(nodes) {
  return COSTS.map((cost) => ({ ...cost, most: nodes.reduce((most, node) => Math.max(most, node.module[cost.key] || 0), 0) })).filter((cost) => cost.most > 0);
}

/** What is known of one module, as names and words. */
export function costsOf(module) {
  const found = COSTS.filter((cost) => module[cost.key]).map((cost) => [cost.title, cost.key === "parameters" ? module[cost.key].toLocaleString("en-US") : cost.show(module[cost.key])]);
  if (module.calls > 1) found.push(["calls", String(module.calls)]);
  if (module.aliases) found.push(["also called", module.aliases.join(", ")]);
  if (module.shared_with) found.push(["parameters shared with", module.shared_with.map((path) => path || "the model").join(", ")]);
  return found;
}
