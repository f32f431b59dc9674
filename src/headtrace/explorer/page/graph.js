// A circuit as a graph that can be walked: nodes by id, edges by end, in order of strength.

import { fitting, inert } from "./text.js";

/** What a node can be, in the order in which kinds are listed and laid out. */
export const KINDS = {
  head: { label: "head", words: "attention head", size: [76, 34] },
  mlp: { label: "MLP", words: "MLP", size: [19, 18] },
  embedding: { label: "embedding", words: "embedding", size: [20, 17] },
  attention_bias: { label: "bias", words: "attention bias", size: [18, 18] },
  offset: { label: "offset", words: "offset (bias of its reader)", size: [20, 18] },
  rounding: { label: "rounding", words: "rounding", size: [16, 16] },
  root: { label: "root", words: "root", size: [250, 48] },
};

/**
 * Where an edge can enter its target: at which of its positions it is read, how far right of the middle it is drawn (in
 * widths; the root's edges spread out), and whether its weight is attention or in the unit of the root.
 */
export const SIDES = {
  query: { card: "Query signal", causes: "Causes of its query", at: "dest", port: 0.24, attention: true },
  key: { card: "Key signal", causes: "Causes of its key", at: "src", port: -0.24, attention: true },
  value: { card: "Moved content", causes: "What it moves", at: "src", port: 0, attention: false },
  input: { card: "Input of an MLP", causes: "What it reads", at: "dest", port: 0, attention: false },
  root: { card: "Into the root", causes: "What leads to it", at: "dest", port: null, attention: false },
};

const CAPTION = 300; // the most that the text of the root takes, in pixels

/** Index one circuit of the page's data. Edges keep their place in the file as `index`. */
export function indexCircuit(data) {
  const edges = data.edges.map((edge, index) => ({ ...edge, index }));
  const nodes = new Map(data.nodes.map((node) => [node.id, { ...node, into: [], from: [] }]));
  for (const edge of edges) {
    nodes.get(edge.target).into.push(edge);
    nodes.get(edge.source).from.push(edge);
  }
  for (const node of nodes.values()) {
    node.into.sort(stronger);
    node.from.sort(stronger);
  }
  const layers = data.nodes.flatMap((node) => (node.layer === null ? [] : [node.layer]));
  return {
    data,
    nodes,
    edges,
    ranked: [...edges].sort(stronger),
    root: [...nodes.values()].find((node) => node.kind === "root") ?? null,
    tokens: data.prompt.tokens,
    caption: fitting(inert(data.question), CAPTION),
    longestHead: Math.max(4, ...data.nodes.map((node) => (node.kind === "head" ? `L${node.layer}H${node.head}`.length : 0))),
    layers: layers.length ? [Math.min(...layers), Math.max(...layers)] : [0, 0],
    heaviest: {
      attention: largest(edges.filter((edge) => SIDES[edge.side].attention)),
      root: largest(edges.filter((edge) => !SIDES[edge.side].attention)),
    },
  };
}

/** More influence first; then weight, then the order of the file, so that the order never wavers. */
export function stronger(a, b) {
  return b.flow - a.flow || b.weight - a.weight || a.index - b.index;
}

function largest(edges) {
  return edges.reduce((most, edge) => Math.max(most, edge.weight), 0) || 1;
}

/** An edge's weight against the heaviest of its unit: attention, or what the root measures. */
export function relativeWeight(graph, edge) {
  const whole = SIDES[edge.side].attention ? graph.heaviest.attention : graph.heaviest.root;
  return Math.max(0, edge.weight) / whole;
}

/** The width of an edge on the screen, in pixels: linear in its weight, thinner where there are many. */
export function edgeWidth(graph, edge) {
  const [least, most] = graph.edges.length > 400 ? [0.6, 4] : [0.75, 6];
  return least + (most - least) * relativeWeight(graph, edge);
}

/** The edges on the strongest way from a node up to the root. */
export function wayToRoot(graph, id) {
  const way = [];
  let node = graph.nodes.get(id);
  while (node && node.from.length && way.length < graph.edges.length) {
    way.push(node.from[0]);
    node = graph.nodes.get(node.from[0].target);
  }
  return way;
}

const all = (names) => Object.fromEntries(Object.keys(names).map((name) => [name, true]));

export const FILTERS = {
  detail: Infinity,
  minWeight: 0,
  sides: all(SIDES),
  kinds: all(KINDS),
  layers: [0, Infinity],
  match: "all",
};

/** What a filter lets through: edges in order of strength, and how many of them are drawn one by one. */
export function filterEdges(graph, filters) {
  const passes = (node) =>
    filters.kinds[node.kind] &&
    (node.layer === null || (node.layer >= filters.layers[0] && node.layer <= filters.layers[1]));
  const kept = graph.ranked.filter(
    (edge) =>
      filters.sides[edge.side] &&
      relativeWeight(graph, edge) >= filters.minWeight &&
      passes(graph.nodes.get(edge.source)) &&
      passes(graph.nodes.get(edge.target)) &&
      (filters.match === "all" || (filters.match === "shared") === Boolean(edge.shared)),
  );
  return { shown: kept.slice(0, filters.detail), rest: kept.slice(filters.detail) };
}
