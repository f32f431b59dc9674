// Drawing: geometry in, SVG out. Long circuits are drawn in slices, so that the page never stops answering.

import { pathOf, svg } from "./dom.js";
import { edgeWidth } from "./graph.js";
import { curve, inOneColumn, pointOn } from "./layout.js";
import { KIND_WORDS, nodeName, number, percent, plural, shorten, tokenExact, tokenLabel } from "./text.js";

const SLICE = 250;

export function emptyChart(label) {
  const parts = {};
  const group = (name, attributes = {}) => (parts[name] = svg("g", { class: name, ...attributes }));
  const world = group("world");
  for (const name of ["bands", "bundles", "sources", "edges", "extra"]) world.append(group(name, { "aria-hidden": "true" }));
  world.append(group("effects", { "aria-hidden": "true" }), group("nodes", { role: "list", "aria-label": "Components" }));
  parts.root = svg(
    "svg",
    { class: "chart", role: "application", "aria-roledescription": "circuit diagram", "aria-label": label },
    world,
    group("tags", { "aria-hidden": "true" }),
    group("axes", { "aria-hidden": "true" }),
  );
  return parts;
}

/** Draw a geometry into the parts of a chart. Calls done(drawn) once the last slice is in. */
export function draw(parts, graph, geometry, done) {
  for (const name of ["bands", "bundles", "sources", "edges", "extra", "effects", "nodes", "tags"]) parts[name].replaceChildren();
  const drawn = { edges: new Map(), nodes: new Map(), sources: new Map(), cancelled: false };
  drawBands(parts.bands, geometry);
  parts.bundles.append(...geometry.bundles.map((bundle) => bundlePath(bundle)));
  for (const mark of geometry.sources) {
    drawn.sources.set(mark.id, sourceMark(mark));
    parts.sources.append(drawn.sources.get(mark.id));
  }
  const places = [...geometry.nodes.values()].sort((a, b) => a.y - b.y || a.x - b.x);
  // The strongest edges come first in the list and should lie on top, so they are put in last-to-first.
  inSlices(drawn, geometry.edges, (place) => {
    const edge = graph.edges[place.index];
    const path = edgePath(graph, edge, place);
    drawn.edges.set(place.index, path);
    parts.edges.prepend(path);
  }, () => inSlices(drawn, places, (place) => {
    const group = nodeGroup(graph, graph.nodes.get(place.id), place);
    drawn.nodes.set(place.id, group);
    parts.nodes.append(group);
  }, () => {
    parts.effects.append(...effectChips(graph, geometry));
    done(drawn);
  }));
  return drawn;
}

function inSlices(drawn, items, put, done) {
  let next = 0;
  const slice = () => {
    if (drawn.cancelled) return;
    for (const end = Math.min(items.length, next + SLICE); next < end; next++) put(items[next]);
    if (next < items.length) setTimeout(slice);
    else done();
  };
  slice();
}

function drawBands(group, geometry) {
  const { width } = geometry;
  geometry.rows.filter((row) => row.used).forEach((row, i) => {
    if (i % 2 === 0) group.append(svg("rect", { class: "band", x: 0, y: row.y, width, height: row.height }));
  });
  const top = geometry.rows[0]?.y ?? 0;
  for (const column of geometry.columns) {
    group.append(svg("line", { class: column.used ? "rail used" : "rail", x1: column.middle, x2: column.middle, y1: top, y2: geometry.height - 10 }));
    group.append(svg("rect", { class: "lane", "data-position": column.position, x: column.x, y: top, width: column.width, height: Math.max(0, geometry.height - top) }));
  }
}

function edgePath(graph, edge, place) {
  const shared = edge.shared === undefined ? "" : edge.shared ? " shared" : " only";
  return svg("path", {
    class: `edge ${edge.side}${shared}`,
    "data-index": edge.index,
    d: pathOf(place),
    "stroke-width": edgeWidth(graph, edge).toFixed(2),
    "stroke-opacity": (0.35 + 0.6 * Math.sqrt(Math.min(1, edge.flow * 4))).toFixed(2),
  });
}

/** An edge that is not among those drawn, shown while its node is pinned. */
export function extraPath(graph, geometry, edge) {
  const [source, target] = [geometry.nodes.get(edge.source), geometry.nodes.get(edge.target)];
  if (!source || !target) return null;
  const path = edgePath(graph, edge, curve(source, target, edge.side, inOneColumn(graph, edge)));
  path.classList.add("on");
  return path;
}

function bundlePath(bundle) {
  return svg("path", {
    class: `bundle ${bundle.side}`,
    d: pathOf(bundle),
    "stroke-width": (0.8 + Math.min(6, 0.8 * Math.log2(1 + bundle.edges.length))).toFixed(1),
    "stroke-opacity": (0.05 + Math.min(0.14, 2 * bundle.flow)).toFixed(3),
  });
}

function sourceMark(mark) {
  return svg(
    "g",
    { class: "source" },
    svg("line", { x1: mark.x, y1: mark.y, x2: mark.headX, y2: mark.y }),
    svg("circle", { cx: mark.x, cy: mark.y, r: 4 }),
  );
}

/** What a screen reader says of a node. */
export function describeNode(graph, node) {
  if (node.kind === "root") return `Root: ${graph.data.question}. ${plural(node.into.length, "cause")}.`;
  const parts = [`${nodeName(node)}, ${KIND_WORDS[node.kind]} at ${tokenExact(graph.tokens[node.dest])}`];
  if (node.src !== null) parts.push(`reads ${tokenExact(graph.tokens[node.src])}, attention ${number(node.attention)}`);
  parts.push(`influence ${percent(node.influence)}`, plural(node.into.length, "cause"), plural(node.from.length, "effect"));
  if (node.kind === "head" && !node.expanded) parts.push("not expanded");
  if (!node.explained) parts.push("unexplained");
  return parts.join(", ");
}

function nodeGroup(graph, node, place) {
  const states = [node.kind, place.dot ? "dot" : "", node.kind === "head" && !node.expanded ? "unexpanded" : "", node.explained ? "" : "unexplained"];
  return svg(
    "g",
    {
      class: `node ${states.join(" ")}`.trim().replace(/ +/g, " "),
      "data-id": node.id,
      tabindex: -1,
      role: "listitem",
      "aria-label": describeNode(graph, node),
      transform: `translate(${place.x.toFixed(1)},${place.y.toFixed(1)})`,
    },
    place.dot ? svg("circle", { r: place.w / 2 }) : [...shape(node, place), ...caption(graph, node, place)],
  );
}

export function shape(node, { w, h }) {
  const [a, b] = [w / 2, h / 2];
  if (node.kind === "embedding") return [svg("path", { class: "body", d: `M0,${-b}L${a},${b}H${-a}Z` })];
  if (node.kind === "attention_bias") return [svg("path", { class: "body", d: `M0,${-b}L${a},0L0,${b}L${-a},0Z` })];
  if (node.kind === "offset") return [svg("path", { class: "body", d: `M${-a},0L${-a / 2},${-b}H${a / 2}L${a},0L${a / 2},${b}H${-a / 2}Z` })];
  const body = svg("rect", { class: "body", x: -a, y: -b, width: w, height: h, rx: node.kind === "mlp" ? 3 : node.kind === "root" ? 12 : 9 });
  if (node.kind !== "head" || node.attention === null) return [body];
  const full = w - 16;
  return [
    body,
    svg("rect", { class: "meter", x: -full / 2, y: b - 4.5, width: full, height: 2.2, rx: 1.25 }),
    svg("rect", { class: "level", x: -full / 2, y: b - 4.5, width: (full * Math.min(1, node.attention)).toFixed(1), height: 2.2, rx: 1.25 }),
  ];
}

function caption(graph, node, { h }) {
  if (node.kind === "head") {
    return [
      svg("text", { class: "name", y: -2.5 }, `L${node.layer}H${node.head}`),
      svg("text", { class: "reads", y: 8.5 }, `reads ${shorten(tokenLabel(graph.tokens[node.src]), 6)}`),
    ];
  }
  if (node.kind === "mlp") return [svg("text", { class: "name small", y: 3.5 }, String(node.layer))];
  if (node.kind !== "root") return [];
  return [
    svg("text", { class: "name", y: -3 }, shorten(graph.data.question, 34)),
    svg("text", { class: "reads", y: h / 2 - 9 }, graph.data.root.value === null ? graph.data.root.kind : `${graph.data.root_measure} ${number(graph.data.root.value)}`),
  ];
}

/** The one number of a measured effect that is written on its edge. */
export function effectValue(edge) {
  if (!edge.effect) return null;
  const preferred = ["attention", "attention_change", "metric", "metric_change"].find((key) => typeof edge.effect[key] === "number");
  const key = preferred ?? Object.keys(edge.effect).find((name) => typeof edge.effect[name] === "number");
  return key === undefined ? null : { key, value: edge.effect[key] };
}

/** Measured effects on the edges, strongest first, each where it covers neither a component nor another effect. */
function effectChips(graph, geometry) {
  const taken = [...geometry.nodes.values()].map(({ x, y, w, h }) => [x - w / 2, y - h / 2, x + w / 2, y + h / 2]);
  const chips = [];
  for (const place of geometry.edges.slice(0, 150)) {
    const effect = effectValue(graph.edges[place.index]);
    if (!effect) continue;
    const text = number(effect.value);
    const half = 3.1 * text.length + 3;
    for (const t of [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74]) {
      const [x, y] = pointOn(place, t);
      const box = [x - half, y - 7, x + half, y + 7];
      if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      chips.push(
        svg(
          "g",
          { class: `effect ${graph.edges[place.index].side}`, "data-index": place.index, transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` },
          svg("rect", { x: -half, y: -7, width: 2 * half, height: 14, rx: 7 }),
          svg("text", { y: 3.2 }, text),
        ),
      );
      break;
    }
  }
  return chips;
}
