// MLPs of one token, one above the other, as one element. Only edges between members are hidden: what enters the element
// and what leaves it are the sums of its members' edges, so that all that is drawn still adds up.

const LEAST = 2; // members of an element

/**
 * Which MLPs can be folded: for each token runs of MLPs, from the lowest layer up, that some row of the drawing has room
 * for: above all that feeds a member, and below all that a member feeds. A head that reads one member and feeds another
 * at the same token therefore ends a run, and no line ever leads downwards.
 */
export function mlpRuns(data) {
  const nodes = new Map(data.nodes.map((node) => [node.id, node]));
  const columns = new Map();
  for (const node of data.nodes) {
    if (node.kind !== "mlp" || node.layer === null) continue;
    columns.set(node.dest, [...(columns.get(node.dest) ?? []), node]);
  }
  const ends = new Map(data.nodes.map(({ id }) => [id, { feeds: [], fed: [] }]));
  const alike = (a, b) => a.kind === "mlp" && b.kind === "mlp" && a.dest === b.dest;
  for (const edge of data.edges) {
    const [source, target] = [nodes.get(edge.source), nodes.get(edge.target)];
    if (alike(source, target)) continue;
    ends.get(source.id).feeds.push(target.layer ?? Infinity);
    ends.get(target.id).fed.push(source.layer ?? -1);
  }
  return [...columns.values()].flatMap((column) => runsOf(column.sort((a, b) => a.layer - b.layer), ends));
}

function runsOf(column, ends) {
  const runs = [];
  let run = null;
  for (const node of column) {
    const { feeds, fed } = ends.get(node.id);
    const low = Math.max(run?.low ?? -1, ...fed);
    const high = Math.min(run?.high ?? Infinity, ...feeds);
    if (run && low < high && run.members[0].layer < high) Object.assign(run, { low, high, members: [...run.members, node] });
    else runs.push((run = { low: Math.max(-1, ...fed), high: Math.min(Infinity, ...feeds), members: [node] }));
  }
  return runs.filter(({ members }) => members.length >= LEAST).map(({ low, high, members }) => {
    // The highest row of a member that is below all that the run feeds.
    const layer = Math.max(low, ...members.map((node) => node.layer).filter((each) => each < high));
    return { key: `${members[0].dest}.${members[0].layer}`, layer, members };
  });
}

/** The data of a circuit with each of its runs as one node, except for those whose keys are `open`. */
export function foldMlps(data, open = new Set()) {
  const runs = mlpRuns(data).filter(({ key }) => !open.has(key));
  if (!runs.length) return data;
  const inside = new Map(runs.flatMap((run) => run.members.map((node) => [node.id, run])));
  const folded = runs.map(foldedNode);
  const idOf = (id) => inside.get(id)?.members[0].id ?? id;
  const groups = new Map();
  for (const edge of data.edges) {
    const [source, target] = [idOf(edge.source), idOf(edge.target)];
    if (source === target) continue;
    const key = `${source} ${target} ${edge.side}`;
    groups.set(key, [...(groups.get(key) ?? []), edge]);
  }
  const layers = new Map(data.nodes.map((node) => [node.id, node.layer]));
  const edges = [...groups.values()].map((some) => joined(some, idOf(some[0].source), idOf(some[0].target), layers));
  const nodes = [...data.nodes.filter(({ id }) => !inside.has(id)), ...folded].sort((a, b) => a.id - b.id);
  return { ...data, nodes, edges };
}

function foldedNode({ key, layer, members }) {
  const [first, last] = [members[0].layer, members.at(-1).layer];
  const name = `MLPs ${first}-${last} @${members[0].dest}`;
  const influence = members.some((node) => node.influence === null) ? null : Math.max(...members.map((node) => node.influence));
  const found = { ...members[0], name, layer, influence, expanded: true, explained: members.every((node) => node.explained) };
  // Members feed one another, so that what passes through them is not to be added: an element has no number of its own.
  for (const field of ["flow", "contribution", "moves", "attends", "spread", "neurons", "label", "predicted"]) delete found[field];
  return { ...found, members: { key, first, last, layers: members.map((node) => node.layer), ids: members.map(({ id }) => id) } };
}

/** Edges with the same ends and side as one: their weights add up. What was measured of one is not so of all. */
function joined(edges, source, target, layers) {
  if (edges.length === 1) return { ...edges[0], source, target };
  const sum = (of) => (edges.some((edge) => of(edge) == null) ? null : edges.reduce((total, edge) => total + of(edge), 0));
  const flows = new Map();
  for (const { channels, flows: parts } of edges) {
    (channels ?? []).forEach((channel, i) => flows.set(channel, (flows.get(channel) ?? 0) + (parts?.[i] ?? 0)));
  }
  const found = { ...edges[0], source, target, weight: sum((edge) => edge.weight), flow: sum((edge) => edge.flow), joined: edges.length };
  for (const field of ["effect", "left", "through", "description", "evidence", "flows", "logits"]) delete found[field];
  found.channels = flows.size ? [...flows.keys()].sort((a, b) => a - b) : null;
  if (edges.every((edge) => edge.flows)) found.flows = found.channels?.map((channel) => flows.get(channel));
  found.contribution = sum((edge) => edge.contribution);
  if (edges.every((edge) => edge.logits)) found.logits = [0, 1].map((i) => sum((edge) => edge.logits[i]));
  const worded = edges.filter((edge) => edge.description).sort((a, b) => b.flow - a.flow)[0];
  if (worded) {
    const whose = worded.source === source && edges.every((edge) => edge.source === worded.source) ? "" : `MLP ${layers.get(worded.source)}: `;
    Object.assign(found, { description: `${whose}${worded.description}`, evidence: worded.evidence });
  }
  return found;
}
