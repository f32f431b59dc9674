// Two circuits side by side: which edges they share.

import { componentName, nodeName, number, plural } from "./text.js";
import { el } from "./dom.js";
import { stronger } from "./graph.js";

/** Whether two circuits are of the same tokens; then positions count, otherwise only components do. */
export function samePrompt(a, b) {
  const [x, y] = [a.data.prompt.token_ids, b.data.prompt.token_ids];
  return x.length === y.length && x.every((id, i) => id === y[i]);
}

export function edgeKey(graph, edge, withPositions) {
  const name = withPositions ? nodeName : componentName;
  return `${name(graph.nodes.get(edge.source))} ${edge.side} ${name(graph.nodes.get(edge.target))}`;
}

/** Mark every edge of both circuits as shared or not. */
export function markShared(a, b) {
  const withPositions = samePrompt(a, b);
  const keys = [a, b].map((graph) => new Set(graph.edges.map((edge) => edgeKey(graph, edge, withPositions))));
  [a, b].forEach((graph, i) => {
    for (const edge of graph.edges) edge.shared = keys[1 - i].has(edgeKey(graph, edge, withPositions));
  });
  return withPositions;
}

export function unmark(graph) {
  for (const edge of graph.edges) delete edge.shared;
}

/** The nodes of another circuit that play the same part as a node of this one. */
export function counterparts(graph, node, other) {
  const name = samePrompt(graph, other) ? nodeName : componentName;
  return [...other.nodes.values()].filter((candidate) => name(candidate) === name(node)).map((candidate) => candidate.id);
}

export function comparePanel(a, b, withPositions, choose) {
  const count = (graph) => graph.edges.filter((edge) => edge.shared).length;
  const rule = withPositions
    ? "The prompts are the same, so edges are matched by component and position."
    : "The prompts differ, so edges are matched by component, whatever the position.";
  const only = (graph, which, title) => {
    const edges = graph.edges.filter((edge) => !edge.shared).sort(stronger);
    const rows = edges.slice(0, 10).map((edge) =>
      el("li", {}, el("button", { type: "button", class: `row ${edge.side}`, onclick: () => choose(which, edge.source) },
        el("span", { class: "swatch" }),
        el("span", { class: "what" }, `${nodeName(graph.nodes.get(edge.source))} → ${componentName(graph.nodes.get(edge.target))}`),
        el("span", { class: "weight" }, number(edge.weight)))));
    return el("section", {}, el("h3", {}, title), edges.length ? el("ul", { class: "edges-list" }, ...rows) : el("p", { class: "kind" }, "none"));
  };
  return [
    el("h2", {}, "Two circuits"),
    el("p", { class: "kind" }, rule),
    el("dl", { class: "facts" },
      el("dt", {}, "A"), el("dd", {}, `${plural(count(a), "shared edge")}, ${a.edges.length - count(a)} only here`),
      el("dt", {}, "B"), el("dd", {}, `${plural(count(b), "shared edge")}, ${b.edges.length - count(b)} only here`)),
    only(a, 0, "Only in A, most influential first"),
    only(b, 1, "Only in B, most influential first"),
  ];
}
