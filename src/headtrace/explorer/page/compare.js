// Two circuits side by side: which edges they share.

import { componentName, number, plural } from "./text.js";
import { el } from "./dom.js";
import { listHead } from "./details.js";
import { stronger } from "./graph.js";

/** Whether two circuits are of the same tokens; then positions count, otherwise only components do. */
export function samePrompt(a, b) {
  const [x, y] = [a.data.prompt.token_ids, b.data.prompt.token_ids];
  return x.length === y.length && x.every((id, i) => id === y[i]);
}

const wholeName = (node) => node.name;

export function edgeKey(graph, edge, withPositions) {
  const name = withPositions ? wholeName : componentName;
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
  const name = samePrompt(graph, other) ? wholeName : componentName;
  const alike = [...other.nodes.values()].filter((candidate) => name(candidate) === name(node));
  return alike.map((candidate) => candidate.id);
}

/** The panel of a comparison: how much is shared, and what is not. `choose(which, id)` goes to a node. */
export function comparePanel(a, b, withPositions, choose) {
  const rule = withPositions
    ? "The prompts are the same, so edges are matched by component and position."
    : "The prompts differ, so edges are matched by component, whatever the position.";
  const swatch = (name) => el("span", { class: `swatch ${name}` });
  return [
    el("h2", {}, "Two circuits"),
    el("p", { class: "kind" }, rule),
    el("p", { class: "match-legend" }, swatch("shared"), " in both ", swatch("query"), swatch("key"), " only in this one"),
    el("dl", { class: "facts" }, [a, b].flatMap((graph, i) => [el("dt", {}, "AB"[i]), el("dd", {}, counts(graph))])),
    exclusive(a, "Only in A", (id) => choose(0, id)),
    exclusive(b, "Only in B", (id) => choose(1, id)),
  ];
}

function counts(graph) {
  const shared = graph.edges.filter((edge) => edge.shared).length;
  return `${plural(shared, "shared edge")}, ${graph.edges.length - shared} only here`;
}

function exclusive(graph, title, choose) {
  const edges = graph.edges.filter((edge) => !edge.shared).sort(stronger);
  const shown = edges.slice(0, 10);
  const rows = shown.map((edge) => {
    const [source, target] = [graph.nodes.get(edge.source), graph.nodes.get(edge.target)];
    const button = { type: "button", class: `row ${edge.side}`, onclick: () => choose(edge.source) };
    const what = el("span", { class: "what" }, `${source.name} → ${componentName(target)}`);
    const weight = el("span", { class: "weight" }, number(edge.weight));
    return el("li", {}, el("button", button, el("span", { class: "swatch" }), what, weight));
  });
  const list = rows.length ? el("ul", { class: "edges-list" }, ...rows) : el("p", { class: "kind" }, "none");
  return el("section", {}, el("h3", {}, title), rows.length ? listHead(graph, shown, false) : null, list);
}
