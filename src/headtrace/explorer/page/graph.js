// A circuit as a graph that can be walked: nodes by id, edges by end, in order of strength.

import { foldMlps } from "./fold.js";
import { brief, fitting, inert, shorten, tokenLabel } from "./text.js";

/** What a node can be, in the order in which kinds are listed and laid out. */
export const KINDS = {
  head: { label: "head", words: "attention head", size: [76, 34] },
  mlp: { label: "MLP", words: "MLP", size: [19, 18] },
  embedding: { label: "embedding", words: "embedding", size: [20, 17] },
  position: { label: "position", words: "position embedding", size: [18, 17] },
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

/** What can be followed: why heads attend, what is moved, or both. Seeds of the root belong to either. */
export const PATHS = {
  both: { label: "both", shows: () => true },
  attention: {
    label: "attention",
    sides: ["query", "key", "root"],
    shows: (graph, edge) => SIDES[edge.side].attention || (edge.side === "root" && graph.nodes.get(edge.source).kind === "head"),
  },
  content: { label: "content", sides: ["value", "input", "root"], shows: (graph, edge) => !SIDES[edge.side].attention && edge.leads },
};

const READ_LETTERS = 6; // of the token that a head reads
const CAPTION = 300; // the most that the text of the root takes, in pixels

/** Index one circuit of the page's data. Edges are numbered in its order as `index`. */
export function indexCircuit(data) {
  const edges = data.edges.map((edge, index) => ({ ...edge, index }));
  const reads = ({ kind, src }) => (kind === "head" ? `reads ${shorten(tokenLabel(data.prompt.tokens[src]), READ_LETTERS)}` : null);
  const nodes = new Map(data.nodes.map((node) => [node.id, { ...node, reads: reads(node), into: [], from: [] }]));
  for (const edge of edges) {
    nodes.get(edge.target).into.push(edge);
    nodes.get(edge.source).from.push(edge);
  }
  const root = [...nodes.values()].find((node) => node.kind === "root") ?? null;
  const difference = data.difference ?? null;
  if (difference) markFlows(edges, difference.value - difference.other_value);
  else markContent(edges, data.root.kind);
  const heaviest = {
    attention: largest(difference ? edges : edges.filter((edge) => SIDES[edge.side].attention)),
    root: largest(difference ? edges : edges.filter((edge) => !SIDES[edge.side].attention && !edge.mixed)),
  };
  markLeading(nodes, root, SLIGHT * heaviest.root);
  for (const node of nodes.values()) {
    node.into.sort(stronger);
    node.from.sort(stronger);
  }
  const ranked = [...edges].sort(stronger);
  const layers = data.nodes.flatMap((node) => (node.layer === null ? [] : [node.layer]));
  return {
    data,
    nodes,
    edges,
    ranked,
    worded: byTurns(firstPerTarget(ranked.filter((edge) => edge.description)), ranked.filter((edge) => !edge.description)),
    root,
    tokens: data.prompt.tokens,
    difference,
    ...tokenBars(data.prompt, difference),
    caption: fitting(inert(data.question), CAPTION),
    longestHead: Math.max(4, ...data.nodes.map((node) => (node.kind === "head" ? `L${node.layer}H${node.head}`.length : 0))),
    layers: layers.length ? [Math.min(...layers), Math.max(...layers)] : [0, 0],
    heaviest,
  };
}

/**
 * What the drawing needs to know of edges that carry content: whether they oppose the root, whether their weight stands
 * for signals as well as for their contribution (where heads are the root, for nothing else), and how strong they are.
 * Influence is shared by all sides of a firing, and none of it is left for what opposes; content has a share of its own.
 */
function markContent(edges, root) {
  const seeds = edges.filter((edge) => edge.side === "root" && edge.weight > 0);
  const whole = seeds.reduce((sum, edge) => sum + edge.weight, 0) || 1;
  for (const edge of edges) {
    const moved = edge.side === "value" || edge.side === "input";
    edge.opposing = !SIDES[edge.side].attention && edge.weight < 0;
    edge.mixed = moved && (root === "heads" || !alike(edge.weight, edge.contribution ?? edge.weight));
    edge.strength = SIDES[edge.side].attention ? edge.flow : Math.max(edge.flow, Math.abs(passing(edge)) / whole);
  }
}

/** In a difference circuit every edge carries flow in the unit of the root, for the difference or against it. */
function markFlows(edges, change) {
  for (const edge of edges) {
    edge.opposing = edge.weight * change < 0;
    edge.mixed = false;
    edge.strength = Math.abs(edge.weight / change);
  }
}

/** What passes through an edge of content, in the unit of the root; zero where that is not known. */
function passing(edge) {
  return edge.mixed ? (edge.contribution ?? 0) : edge.weight;
}

/** The number that is told of an edge. */
export function amountOf(edge) {
  return edge.mixed ? (edge.contribution ?? edge.weight) : edge.weight;
}

const SLIGHT = 0.01; // of the heaviest: content that is there for the signals it became, not for the root

/** Content that leads to the root by content alone. */
function markLeading(nodes, root, least) {
  const reached = new Set(root ? [root.id] : []);
  const leads = (edge) => !SIDES[edge.side].attention && !(edge.mixed && Math.abs(passing(edge)) < least);
  for (const id of reached) {
    for (const edge of nodes.get(id).into.filter(leads)) {
      edge.leads = true;
      reached.add(edge.source);
    }
  }
}

/** Equal to three digits, which is all that is shown. */
function alike(a, b) {
  return Math.abs(a - b) <= 0.001 * Math.max(Math.abs(a), Math.abs(b));
}

const SAID = 0.05; // of the largest amount: less is a bar without a number

/**
 * The bars over the tokens: what was measured, where it was; else the flow from what differs, or what embeddings
 * contribute. What a contribution of the first token stands for, constants and sinks, is told apart.
 */
function tokenBars({ importance, contributions }, difference) {
  const bars = (values, title, row, constants = null) => ({ amounts: tokenAmounts(values), bars: { title, row, constants } });
  if (importance) return bars(importance.map((value) => value ?? 0), "What matters (measured: mean loss when the word is exchanged)", "lost without it");
  if (difference) return bars(difference.tokens, "Flow from each token that differs", "flow");
  if (contributions) return bars(contributions.map((value, i) => (i ? value : 0)), "What each token contributes", "contribution", contributions[0]);
  return { amounts: null, bars: null };
}

/** What each token contributes: the amount, its share of the largest, and a word where it is large enough for one. */
function tokenAmounts(contributions) {
  if (!contributions) return null;
  const most = Math.max(...contributions.map(Math.abs)) || 1;
  const word = (value) => (Math.abs(value) < SAID * most ? "" : value > 0 ? `+${brief(value)}` : brief(value));
  return contributions.map((value) => ({ value, share: value / most, word: word(value) }));
}

/** Whether a circuit says both why heads attend and what is moved. */
export function hasBoth(graph) {
  const any = (...sides) => graph.edges.some((edge) => sides.includes(edge.side));
  return any("query", "key") && any("value", "input");
}

/** A graph with MLPs of one token folded into one element each (fold.js), except for those that are `open`. */
export function foldGraph(graph, open) {
  const data = foldMlps(graph.data, open);
  return data === graph.data ? graph : Object.assign(indexCircuit(data), { unfolded: graph });
}

/** A firing whose causes were not looked for, although there may be some. */
export function unexpanded(node) {
  return node.kind === "head" && !node.expanded;
}

/** The stronger first; then weight, then the order of the file, so that the order never wavers. */
export function stronger(a, b) {
  return b.strength - a.strength || b.weight - a.weight || a.index - b.index;
}

/** Of each target the first edge, then all others. */
function firstPerTarget(edges) {
  const seen = new Set();
  const first = edges.filter(({ target }) => !seen.has(target) && seen.add(target));
  return [...first, ...edges.filter((edge) => !first.includes(edge))];
}

/** One of each in turn, as long as there are both: content is stronger than signals, and only signals have words. */
function byTurns(some, others) {
  const both = Math.min(some.length, others.length);
  return [...some.slice(0, both).flatMap((edge, i) => [edge, others[i]]), ...some.slice(both), ...others.slice(both)];
}

function largest(edges) {
  return edges.reduce((most, edge) => Math.max(most, Math.abs(edge.weight)), 0) || 1;
}

/**
 * An edge's weight against the heaviest of its unit: attention, or what the root measures. A weight that stands for
 * signals as well as for content has no unit; there it is the contribution, or the share of influence if that is more.
 */
export function relativeWeight(graph, edge) {
  if (SIDES[edge.side].attention) return Math.max(0, edge.weight) / graph.heaviest.attention;
  const share = Math.abs(passing(edge)) / graph.heaviest.root;
  return edge.mixed ? Math.min(1, Math.max(share, edge.strength)) : share;
}

/** The width of an edge on the screen, in pixels: linear in its weight, thinner where there are many. */
export function edgeWidth(graph, edge) {
  const [least, most] = graph.edges.length > 400 ? [0.6, 4] : [0.75, 6];
  return least + (most - least) * relativeWeight(graph, edge);
}

/** The edges on the strongest way from a node up to the root, among those that can be seen. */
export function wayToRoot(graph, id, seen) {
  const way = [];
  const next = (from) => graph.nodes.get(from).from.find(seen);
  for (let edge = next(id); edge && way.length < graph.edges.length; edge = next(edge.target)) way.push(edge);
  return way;
}

const all = (names) => Object.fromEntries(Object.keys(names).map((name) => [name, true]));

export const FILTERS = {
  detail: Infinity,
  minWeight: 0,
  paths: "both",
  sides: all(SIDES),
  kinds: all(KINDS),
  layers: [0, Infinity],
  match: "all",
  words: true,
};

/** Whether an edge is of a side, and on a path, that is shown. */
export function sideShown(graph, edge, filters) {
  return filters.sides[edge.side] && PATHS[filters.paths].shows(graph, edge);
}

/** What a filter lets through: edges in order of strength, and how many of them are drawn one by one. */
export function filterEdges(graph, filters) {
  const passes = (node) =>
    filters.kinds[node.kind] &&
    (node.layer === null || (node.layer >= filters.layers[0] && node.layer <= filters.layers[1]));
  const kept = (filters.words ? graph.worded : graph.ranked).filter(
    (edge) =>
      sideShown(graph, edge, filters) &&
      relativeWeight(graph, edge) >= filters.minWeight &&
      passes(graph.nodes.get(edge.source)) &&
      passes(graph.nodes.get(edge.target)) &&
      (filters.match === "all" || (filters.match === "shared") === Boolean(edge.shared)),
  );
  return { shown: kept.slice(0, filters.detail), rest: kept.slice(filters.detail) };
}
