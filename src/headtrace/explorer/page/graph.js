// A circuit as a graph that can be walked: nodes by id, edges by end, in order of strength.

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
    layers: layers.length ? [Math.min(...layers), Math.max(...layers)] : [0, 0],
    heaviest: {
      root: largest(edges.filter((edge) => edge.side === "root")),
      inner: largest(edges.filter((edge) => edge.side !== "root")),
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
  const whole = edge.side === "root" ? graph.heaviest.root : graph.heaviest.inner;
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

export const FILTERS = {
  detail: Infinity,
  minWeight: 0,
  sides: { query: true, key: true, root: true },
  kinds: { head: true, mlp: true, embedding: true, attention_bias: true, offset: true, root: true },
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
