// Words about what is looked at: the card under the pointer and the panel beside the drawing.

import { el } from "./dom.js";
import { effectValue } from "./drawing.js";
import { KIND_WORDS, componentName, nodeName, number, percent, plural, tokenExact } from "./text.js";

export const SIDE_WORDS = { query: "query", key: "key", root: "root" };

function token(graph, position) {
  return el("bdi", { class: "token", title: `position ${position}` }, tokenExact(graph.tokens[position]));
}

function facts(rows) {
  return el("dl", { class: "facts" }, rows.filter(Boolean).flatMap(([term, ...value]) => [el("dt", {}, term), el("dd", {}, ...value)]));
}

function meter(value) {
  const bar = el("span", { class: "meter" }, el("span", {}));
  bar.firstChild.style.width = `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
  return bar;
}

function nodeFacts(graph, node) {
  if (node.kind === "root") return rootFacts(graph, node);
  const predicted = Object.entries(node.predicted ?? {}).filter(([, value]) => value !== null);
  return facts([
    node.kind === "head" ? ["writes at", token(graph, node.dest), ` ${node.dest}`] : ["at", token(graph, node.dest), ` ${node.dest}`],
    node.src !== null && ["reads", token(graph, node.src), ` ${node.src}`],
    node.attention !== null && ["attention", number(node.attention), meter(node.attention)],
    node.threshold != null && ["threshold", number(node.threshold)],
    ...predicted.map(([side, value]) => [`without ${side}`, `${number(value)} (predicted)`]),
    node.influence !== null && ["influence", percent(node.influence), meter(node.influence)],
    node.label && ["label", el("bdi", {}, node.label)],
    node.kind === "head" && !node.expanded && ["", "not traced further"],
    !node.explained && ["", "unexplained: its attention holds although everything was removed"],
  ]);
}

function rootFacts(graph, node) {
  const { root } = graph.data;
  return facts([
    ["kind", root.kind],
    root.value !== null && [graph.data.root_measure, number(root.value)],
    ["causes", String(node.into.length)],
  ]);
}

function edgeFacts(graph, edge) {
  const [source, target] = [graph.nodes.get(edge.source), graph.nodes.get(edge.target)];
  const effects = Object.entries(edge.effect ?? {}).filter(([, value]) => value !== null);
  return facts([
    ["from", nodeName(source), " ", source.dest === null ? "" : token(graph, source.dest)],
    ["into", edge.side === "root" ? "the root" : `${SIDE_WORDS[edge.side]} of ${nodeName(target)}`, " ", target.dest === null ? "" : token(graph, edge.side === "key" ? target.src : target.dest)],
    ["weight", number(edge.weight)],
    edge.channels && [edge.channels.length === 1 ? "channel" : "channels", edge.channels.join(", ")],
    source.attention !== null && ["attention", number(source.attention)],
    ["influence", percent(edge.flow)],
    ...effects.map(([name, value]) => [`measured ${name.replaceAll("_", " ")}`, typeof value === "number" ? number(value) : String(value)]),
    edge.shared !== undefined && ["", edge.shared ? "in both circuits" : "only in this circuit"],
  ]);
}

function description(edge) {
  return edge.description ? el("p", { class: "description" }, el("bdi", {}, edge.description)) : null;
}

/** The card under the pointer. */
export function nodeCard(graph, node) {
  const title = node.kind === "root" ? graph.data.question : nodeName(node);
  return [el("h3", {}, el("bdi", {}, title)), el("p", { class: "kind" }, KIND_WORDS[node.kind]), nodeFacts(graph, node)];
}

export function edgeCard(graph, edge) {
  return [el("h3", { class: edge.side }, edge.side === "root" ? "Into the root" : `${SIDE_WORDS[edge.side]} signal`), edgeFacts(graph, edge), description(edge)];
}

/** A list of edges as buttons: each leads to the node at its other end. */
function edgeList(graph, edges, end, choose, both = false) {
  const items = edges.slice(0, 60).map((edge) => {
    const node = graph.nodes.get(edge[end]);
    const effect = effectValue(edge);
    return el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: `row ${edge.side}`, "data-index": edge.index, onclick: () => choose(node.id) },
        el("span", { class: "swatch" }),
        el("span", { class: "what" }, both ? bothEnds(graph, edge) : [nodeName(node), " ", node.dest === null ? "" : token(graph, node.src ?? node.dest)]),
        effect ? el("span", { class: "measured", title: `measured ${effect.key}` }, number(effect.value)) : null,
        el("span", { class: "weight" }, number(edge.weight)),
      ),
      description(edge),
    );
  });
  if (edges.length > 60) items.push(el("li", { class: "more" }, `and ${edges.length - 60} weaker ones`));
  return el("ul", { class: "edges-list" }, ...items);
}

function bothEnds(graph, edge) {
  return `${nodeName(graph.nodes.get(edge.source))} → ${componentName(graph.nodes.get(edge.target))}`;
}

function section(title, ...content) {
  return el("section", {}, el("h3", {}, title), ...content);
}

/** The panel for a pinned node: what it is, what causes it, what it causes. */
export function nodePanel(graph, node, choose, close) {
  const title = node.kind === "root" ? graph.data.question : nodeName(node);
  const causes = ["root", "query", "key"].map((side) => [side, node.into.filter((edge) => edge.side === side)]);
  return [
    el("div", { class: "panel-head" }, el("h2", {}, el("bdi", {}, title)), el("button", { type: "button", class: "quiet", "aria-label": "Unpin", onclick: close }, "✕")),
    el("p", { class: "kind" }, KIND_WORDS[node.kind]),
    nodeFacts(graph, node),
    ...causes.filter(([, edges]) => edges.length).map(([side, edges]) =>
      section(side === "root" ? "What leads to it" : `Causes of its ${side}`, edgeList(graph, edges, "source", choose))),
    node.from.length ? section("What it causes", edgeList(graph, node.from, "target", choose)) : null,
  ].filter(Boolean);
}

/** The panel when nothing is pinned. */
export function overviewPanel(graph, choose) {
  const { data } = graph;
  const strongest = graph.ranked.filter((edge) => edge.side !== "root").slice(0, 10);
  const seeds = graph.ranked.filter((edge) => edge.side === "root").slice(0, 8);
  return [
    el("h2", {}, "This circuit"),
    el("p", { class: "prompt" }, el("bdi", {}, data.prompt.text ?? data.prompt.tokens.join(""))),
    facts([
      ["root", data.root.kind, data.root.value === null ? "" : `, ${data.root_measure} ${number(data.root.value)}`],
      ["model", el("bdi", {}, data.model.name)],
      ["method", data.method.name],
      ["size", `${plural(data.heads, "firing")}, ${plural(graph.edges.length, "edge")}`],
      data.influence_kept != null && ["influence kept", percent(data.influence_kept)],
      data.unexplained && ["unexplained", data.unexplained.slice(0, 6).join(", ")],
    ]),
    data.reason ? el("p", { class: "reason" }, `No circuit: ${data.reason}`) : null,
    seeds.length ? section("Straight into the root", edgeList(graph, seeds, "source", choose)) : null,
    strongest.length ? section("Most influential signals", edgeList(graph, strongest, "source", choose, true)) : null,
  ].filter(Boolean);
}
