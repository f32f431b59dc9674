// Drawing: geometry in, SVG out. What is large is drawn in slices, so that the page never stops answering.

import { pathOf, svg } from "./dom.js";
import { KINDS, edgeWidth, unexpanded } from "./graph.js";
import { curve, inOneColumn, overlap, pointOn } from "./layout.js";
import { brief, componentName, inert, mlpLabel, number, percent, plural, signed, tokenExact, tokenLabel } from "./text.js";
import { unsupported, wordsOf } from "./words.js";

const SLICE = 250;

const LAYERS = { under: ["bands"], chart: ["bundles", "sources", "edges", "effects", "nodes"], over: ["lit"] };

/**
 * Three drawings on top of each other: the ground, the circuit, and what is looked at. The browser keeps each as a
 * picture of its own, so lighting up a few edges and dimming the rest never paints the whole circuit again.
 */
export function emptyChart(label) {
  const parts = { worlds: [], layers: [] };
  const hidden = { "aria-hidden": "true" };
  for (const [layer, names] of Object.entries(LAYERS)) {
    for (const name of names) parts[name] = svg("g", { class: name, ...(name === "nodes" ? {} : hidden) });
    const world = svg("g", { class: "world" }, ...names.map((name) => parts[name]));
    parts[layer] = svg("svg", { class: `layer ${layer}`, ...(layer === "chart" ? {} : hidden) }, world);
    parts.worlds.push(world);
    parts.layers.push(parts[layer]);
  }
  parts.chart.append((parts.tags = svg("g", { class: "tags", ...hidden })), (parts.words = svg("g", { class: "words", ...hidden })));
  parts.over.append((parts.litTags = svg("g", { class: "tags" })), (parts.litWords = svg("g", { class: "words" })), (parts.axes = svg("g", { class: "axes" })));
  const spoken = { role: "application", "aria-roledescription": "circuit diagram", "aria-label": label };
  for (const [name, value] of Object.entries(spoken)) parts.chart.setAttribute(name, value);
  for (const [name, value] of [["role", "group"], ["aria-label", "Components"]]) parts.nodes.setAttribute(name, value);
  return parts;
}

/**
 * Draw a geometry into the parts of a chart: a slice of edges and a slice of components before it returns, so that the
 * first frame shows the circuit, and the rest in slices. Calls done(drawn) once the last one is in.
 */
export function draw(parts, graph, geometry, done) {
  for (const name of Object.values(LAYERS).flat()) parts[name].replaceChildren();
  const drawn = { edges: new Map(), nodes: new Map(), sources: new Map(), effects: new Map(), cancelled: false };
  drawBands(parts.bands, geometry);
  parts.bundles.append(...geometry.bundles.map((bundle) => bundlePath(bundle)));
  for (const mark of geometry.sources) {
    drawn.sources.set(mark.id, sourceMark(mark));
    parts.sources.append(drawn.sources.get(mark.id));
  }
  for (const place of effectPlaces(graph, geometry)) {
    const chip = effectChip(graph, place);
    drawn.effects.set(place.index, chip);
    parts.effects.append(chip);
  }
  const places = [...geometry.nodes.values()].sort((a, b) => a.dot - b.dot || a.y - b.y || a.x - b.x);
  // Where dots come later, one line that looks like them holds their places.
  const later = places.length > SLICE ? dotsAsOne(places.filter((place) => place.dot)) : null;
  if (later) parts.sources.append(later);
  // The strongest edges come first in the list and should lie on top, so they are put in last-to-first.
  inSlices(drawn, geometry.edges, (place) => {
    const edge = graph.edges[place.index];
    const [path, ...ends] = edgePaths(graph, edge, place);
    drawn.edges.set(place.index, path);
    parts.edges.prepend(path, ...ends);
  }, () => inSlices(drawn, places, (place) => {
    const group = nodeGroup(graph, graph.nodes.get(place.id), place);
    drawn.nodes.set(place.id, group);
    parts.nodes.append(group);
  }, () => {
    later?.remove();
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

function dotsAsOne(places) {
  const d = places.map(({ x, y }) => `M${x.toFixed(1)},${y.toFixed(1)}h0`).join("");
  return svg("path", { class: "dots", d, "stroke-width": places[0]?.w ?? 0 });
}

function drawBands(group, geometry) {
  const { width } = geometry;
  geometry.rows.filter((row) => row.used).forEach((row, i) => {
    if (i % 2 === 0) group.append(svg("rect", { class: "band", x: 0, y: row.y, width, height: row.height }));
  });
  const top = geometry.rows[0]?.y ?? 0;
  const crowded = geometry.columns.length > 80;
  for (const column of geometry.columns.filter((candidate) => candidate.shaped || !crowded)) {
    for (const x of column.lanes ?? [column.middle]) {
      const at = { x1: x, x2: x, y1: top, y2: geometry.height - 10 };
      group.append(svg("line", { class: column.used ? "rail used" : "rail", ...at }));
    }
  }
}

/** The line of an edge; what opposes the root ends in a bar, as well. */
function edgePaths(graph, edge, place) {
  const shared = edge.shared === undefined ? "" : edge.shared ? " shared" : " only";
  const opacity = (0.35 + 0.6 * Math.sqrt(Math.min(1, edge.strength * 4))).toFixed(2);
  const look = `${edge.side}${edge.opposing ? " opposing" : ""}${shared}`;
  const line = svg("path", {
    class: `edge ${look}`,
    "data-index": edge.index,
    d: pathOf(place),
    "stroke-width": edgeWidth(graph, edge).toFixed(2),
    "stroke-opacity": opacity,
  });
  return edge.opposing ? [line, svg("path", { class: `edge-end ${look}`, d: barAt(place), "stroke-opacity": opacity })] : [line];
}

const BAR = 7; // half of its length

/** A bar across the end of a curve, a little before it. */
function barAt({ x2, y2, x3, y3 }) {
  const length = Math.hypot(x3 - x2, y3 - y2) || 1;
  const [dx, dy] = [(x3 - x2) / length, (y3 - y2) / length];
  const [x, y] = [x3 - 4 * dx, y3 - 4 * dy];
  const point = (sign) => `${(x - sign * BAR * dy).toFixed(1)},${(y + sign * BAR * dx).toFixed(1)}`;
  return `M${point(1)}L${point(-1)}`;
}

/**
 * What is looked at, drawn once more on top; the layers below are then dimmed as a whole. Nothing that was drawn
 * changes its style, so it costs the same however large the circuit is.
 */
export function litParts(graph, geometry, drawn, { edges, way, nodes, self }) {
  const path = (edge, state) => {
    const [source, target] = [geometry.nodes.get(edge.source), geometry.nodes.get(edge.target)];
    if (!source || !target) return [];
    const made = edgePaths(graph, edge, curve(source, target, edge.side, inOneColumn(graph, edge)));
    for (const element of made) element.classList.add(state);
    return made;
  };
  const copies = [...nodes].map((id) => copyOf(drawn.nodes.get(id), id === self));
  const paths = [...way.flatMap((edge) => path(edge, "near")), ...edges.flatMap((edge) => path(edge, "on"))];
  const numbers = [...way, ...edges].map((edge) => copyOf(drawn.effects.get(edge.index)));
  return [...paths, ...numbers, copyOf(drawn.sources.get(self)), ...copies].filter(Boolean);
}

function copyOf(element, self = false) {
  const copy = element?.cloneNode(true);
  for (const name of ["data-id", "data-index", "tabindex", "role", "aria-label", "aria-pressed"]) copy?.removeAttribute(name);
  if (self) copy?.classList.add("self");
  return copy;
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
  if (node.kind === "root") return `Root: ${inert(graph.data.question)}. ${plural(node.into.length, "cause")}.`;
  const at = tokenExact(graph.tokens[node.dest]);
  if (node.members) {
    return `MLPs ${node.members.first} to ${node.members.last} at ${at}, ${node.members.layers.length} folded into one, ${plural(node.into.length, "cause")}, ${plural(node.from.length, "effect")}. Enter unfolds them.`;
  }
  const parts = [`${node.name}, ${KINDS[node.kind].words} at ${at}`];
  if (node.src !== null) parts.push(`reads ${tokenExact(graph.tokens[node.src])}, attention ${number(node.attention)}`);
  parts.push(`influence ${percent(node.influence)}`);
  if (node.flow != null) parts.push(`flow ${signed(node.flow)}`);
  if (node.contribution != null) parts.push(`contributes ${signed(node.contribution)}${node.contribution < 0 ? ", opposing" : ""}`);
  parts.push(plural(node.into.length, "cause"), plural(node.from.length, "effect"));
  if (unexpanded(node)) parts.push("not expanded");
  if (!node.explained) parts.push("unexplained");
  const [words] = wordsOf(node);
  if (words) parts.push(`looks for, ${unsupported(words) ? "unsupported" : "in words"}: ${inert(words.description)}`);
  return parts.join(", ");
}

function nodeGroup(graph, node, place) {
  const size = { w: place.w / (place.enlarged ?? 1), h: place.h / (place.enlarged ?? 1) };
  const states = ["node", node.kind];
  if (place.dot) states.push("dot");
  if (place.form !== "full") states.push(place.form);
  if (node.members) states.push("folded");
  if (unexpanded(node)) states.push("unexpanded");
  if (!node.explained) states.push("unexplained");
  const enlarge = place.enlarged > 1 ? ` scale(${place.enlarged.toFixed(3)})` : "";
  return svg(
    "g",
    {
      class: states.join(" "),
      "data-id": node.id,
      tabindex: -1,
      role: "button",
      "aria-pressed": "false",
      "aria-label": describeNode(graph, node),
      transform: `translate(${place.x.toFixed(1)},${place.y.toFixed(1)})${enlarge}`,
    },
    place.dot ? svg("circle", { r: place.w / 2 }) : [...shape(node, size, place.form), ...caption(graph, node, size, place.form)],
  );
}

/** The outline of a component: each kind has its own. */
export function shape(node, { w, h }, form = "full") {
  const [a, b] = [w / 2, h / 2];
  const outlines = {
    embedding: `M0,${-b}L${a},${b}H${-a}Z`,
    position: `M${-a},${-b}L${a},${b}H${-a}Z`,
    attention_bias: `M0,${-b}L${a},0L0,${b}L${-a},0Z`,
    rounding: `M${-a},${-b}H${a}L0,${b}Z`,
    offset: `M${-a},0L${-a / 2},${-b}H${a / 2}L${a},0L${a / 2},${b}H${-a / 2}Z`,
  };
  if (node.kind in outlines) return [svg("path", { class: "body", d: outlines[node.kind] })];
  const rx = { mlp: 3, head: 9, root: 12 }[node.kind];
  const body = svg("rect", { class: "body", x: -a, y: -b, width: w, height: h, rx });
  if (node.kind !== "head" || node.attention === null || form !== "full") return [body];
  const bar = { x: 8 - a, y: b - 4.5, height: 2.2, rx: 1.1 };
  const level = ((w - 16) * Math.min(1, node.attention)).toFixed(1);
  return [body, svg("rect", { class: "meter", ...bar, width: w - 16 }), svg("rect", { class: "level", ...bar, width: level })];
}

function caption(graph, node, { h }, form) {
  if (node.kind === "head" && form === "brief") return [svg("text", { class: "name", y: 4.5 }, componentName(node))];
  if (node.kind === "head") {
    if (form === "compact") {
      return [svg("text", { class: "name", y: 4.5 }, componentName(node), svg("tspan", { class: "reads", dx: 5 }, node.reads))];
    }
    return [svg("text", { class: "name", y: -2.5 }, componentName(node)), svg("text", { class: "reads", y: 8.5 }, node.reads)];
  }
  if (node.kind === "mlp") return [svg("text", { class: "name small", y: 4 }, mlpLabel(node))];
  if (node.kind !== "root") return [];
  const { kind, value } = graph.data.root;
  return [
    svg("text", { class: "name", y: -3 }, graph.caption),
    svg("text", { class: "reads", y: h / 2 - 9 }, value === null ? kind : `${graph.data.root_measure} ${number(value)}`),
  ];
}

/** The one number of a measured effect that is written on its edge. */
export function effectValue(edge) {
  if (!edge.effect) return null;
  const measured = Object.keys(edge.effect).filter((name) => typeof edge.effect[name] === "number");
  const key = ["attention", "metric"].find((name) => measured.includes(name)) ?? measured[0];
  return key === undefined ? null : { key, value: edge.effect[key] };
}

const CHIP = 8; // half of its height

/** Measured effects on the edges, strongest first, each where it covers neither a component nor another effect. */
export function effectPlaces(graph, geometry) {
  if (geometry.effects) return geometry.effects;
  const taken = [...geometry.nodes.values()].map(({ x, y, w, h }) => [x - w / 2, y - h / 2, x + w / 2, y + h / 2]);
  geometry.effects = [];
  for (const place of geometry.edges.slice(0, 150)) {
    const effect = effectValue(graph.edges[place.index]);
    if (!effect) continue;
    const text = brief(effect.value);
    const half = 3.6 * text.length + 3;
    for (const t of [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74]) {
      const [x, y] = pointOn(place, t);
      const box = [x - half, y - CHIP, x + half, y + CHIP];
      if (taken.some((other) => overlap(box, other))) continue;
      taken.push(box);
      geometry.effects.push({ index: place.index, x, y, w: 2 * half, h: 2 * CHIP, text });
      break;
    }
  }
  return geometry.effects;
}

function effectChip(graph, { index, x, y, w, h, text }) {
  return svg(
    "g",
    { class: `effect ${graph.edges[index].side}`, "data-index": index, transform: `translate(${x},${y})` },
    svg("rect", { x: -w / 2, y: -h / 2, width: w, height: h, rx: CHIP }),
    svg("text", { y: 4.2 }, text),
  );
}
