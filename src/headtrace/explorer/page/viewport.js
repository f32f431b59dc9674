// What part of the drawing is seen: fit, zoom, pan; the axes and the labels that keep their size on the screen.

import { svg } from "./dom.js";
import { effectPlaces } from "./drawing.js";
import { SIZE } from "./layout.js";
import { nameTags } from "./tags.js";
import { shorten, tokenExact, tokenLabel } from "./text.js";
import { grown, wordLabels } from "./words.js";

const LEFT = 40;
const TOP = 2;
const RIGHT = 10;
const LETTER = 6.6; // about the width of a letter of the token axis
const SLOPE = 48; // of its labels, in degrees
const WORD = 11; // letters of a token that are shown
const APART = [15, 17]; // between labels, and beside one with a number, which is bold
const BARS = 40; // the room for what tokens contribute, where that is known
const LEAST = 0.02; // of the largest amount: less is no bar

/** Letters that a word after a label takes, with the space before it. */
const lettersOf = (word) => (word ? word.length + 1 : 0);

export function createViewport(host, parts) {
  const view = { scale: 1, x: 0, y: 0, width: 0, height: 0, bottom: 70, bars: 0, moved: false };
  let geometry = null;
  let graph = null;
  let labelled = [];
  let worded = false;

  function resize(width, height) {
    if (width === view.width && height === view.height) return;
    Object.assign(view, { width, height });
    for (const layer of parts.layers) layer.setAttribute("viewBox", `0 0 ${width} ${height}`);
    // A frame is on its way when the window has a new size: what it shows is to fit together.
    if (geometry && !view.moved) fit(true);
    else apply(true);
  }

  /** Show a drawing anew: where the view was moved to, or else as a whole. */
  function show(newGraph, newGeometry, words) {
    [graph, geometry, worded] = [newGraph, newGeometry, words];
    if (view.moved) apply(true);
    else fit(true);
  }

  /** The room between the axes; the lower one is as high as the bars and the longest label of some graphs ask for. */
  function room(graphs) {
    labelled = graphs;
    const letters = graphs.flatMap(({ tokens, amounts }) =>
      tokens.map((token, i) => Math.min(WORD, [...tokenLabel(token)].length) + lettersOf(amounts?.[i].word)));
    view.bars = graphs.some(({ amounts }) => amounts) ? BARS : 0;
    view.bottom = 26 + view.bars + 4.6 * Math.max(1, ...letters);
    return [view.width - LEFT - RIGHT, view.height - TOP - view.bottom];
  }

  function fit(atOnce = false) {
    view.moved = false;
    const [w, h] = room(labelled);
    view.scale = Math.max(0.05, Math.min(SIZE.closest, w / geometry.width, h / geometry.height));
    view.x = LEFT + (w - geometry.width * view.scale) / 2;
    view.y = TOP + Math.max(0, (h - geometry.height * view.scale) / 2);
    apply(atOnce);
  }

  function zoom(factor, cx = view.width / 2, cy = view.height / 2) {
    const scale = Math.max(0.05, Math.min(4, view.scale * factor));
    view.x = cx - ((cx - view.x) * scale) / view.scale;
    view.y = cy - ((cy - view.y) * scale) / view.scale;
    view.scale = scale;
    view.moved = true;
    apply();
  }

  function pan(dx, dy) {
    view.x += dx;
    view.y += dy;
    view.moved = true;
    apply();
  }

  /** Move as little as needed for a place to be in sight. */
  function reveal(place) {
    const [x, y] = [view.x + place.x * view.scale, view.y + place.y * view.scale];
    const dx = Math.max(0, LEFT + 50 - x) - Math.max(0, x - (view.width - 60));
    const dy = Math.max(0, 40 - y) - Math.max(0, y - (view.height - view.bottom - 30));
    if (dx || dy) pan(dx, dy);
  }

  let waiting = false;
  /** Move the drawing; axes and labels follow in the next frame, or at once if the drawing is new. */
  function apply(atOnce = false) {
    const transform = `translate(${view.x.toFixed(2)},${view.y.toFixed(2)}) scale(${view.scale.toFixed(4)})`;
    for (const world of parts.worlds) world.setAttribute("transform", transform);
    if (!geometry) return;
    host.classList.toggle("far", view.scale < geometry.readable);
    if (atOnce) return drawLabels();
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(drawLabels);
  }

  function drawLabels() {
    waiting = false;
    drawAxes();
    parts.tags.replaceChildren(...tags([...geometry.nodes.values()]));
    parts.words.replaceChildren(...words(geometry.edges, [...geometry.nodes.values()], effectPlaces(graph, geometry)));
    light(lit);
  }

  function drawAxes() {
    const bottom = view.height - view.bottom;
    const group = svg("g");
    group.append(svg("rect", { class: "axis-ground", x: 0, y: bottom, width: view.width, height: view.bottom }));
    group.append(svg("rect", { class: "axis-ground", x: 0, y: 0, width: LEFT, height: view.height }));
    group.append(svg("line", { class: "axis-line", x1: LEFT, x2: view.width, y1: bottom + 0.5, y2: bottom + 0.5 }));
    drawLayers(group, bottom);
    if (graph.amounts) drawAmounts(group, bottom);
    drawTokens(group, bottom);
    parts.axes.replaceChildren(group);
  }

  function drawLayers(group, bottom) {
    let last = Infinity;
    const seen = (y) => y <= bottom - 4 && y >= 8;
    for (const row of [...geometry.rows].reverse()) {
      const y = view.y + row.middle * view.scale;
      if (!row.used || !seen(y) || last - y < 12) continue;
      last = y;
      const name = row.layer < 0 ? "emb" : `L${row.layer}`;
      group.append(svg("text", { class: "axis-layer", x: LEFT - 8, y: y + 3.5 }, name));
    }
    for (const { first, last: lowest, y } of skippedRuns()) {
      if (!seen(y)) continue;
      const dots = [-4, 0, 4].map((dy) => svg("circle", { cx: LEFT - 14, cy: y + dy, r: 1.1 }));
      const line = svg("line", { x1: LEFT, x2: view.width, y1: y, y2: y });
      group.append(svg("g", { class: "axis-gap", "data-layers": `${lowest}-${first}` }, line, ...dots));
    }
  }

  /** Neighbouring layers that hold no component: the first and the last of each run, and the height of its mark. */
  function skippedRuns() {
    const runs = [];
    for (const row of geometry.rows.filter((candidate) => candidate.skipped)) {
      const run = runs[runs.length - 1];
      if (run && run.last === row.layer + 1) Object.assign(run, { last: row.layer, end: row.y + row.height });
      else runs.push({ first: row.layer, last: row.layer, start: row.y, end: row.y + row.height });
    }
    return runs.map((run) => ({ ...run, y: view.y + ((run.start + run.end) / 2) * view.scale }));
  }

  /** The run of skipped layers beside a point of the layer axis; null elsewhere. */
  function skippedAt(x, y) {
    if (x > LEFT || y > view.height - view.bottom) return null;
    return skippedRuns().find((run) => Math.abs(run.y - y) < 9) ?? null;
  }

  /** The answer's token first, then those with an amount, then those with components: where there is no room for all labels, the others go. */
  function labelOrder() {
    const asked = graph.data.root.position ?? graph.tokens.length - 1;
    const said = (column) => Boolean(graph.amounts?.[column.position].word);
    const rank = (column) => (column.position === asked ? 0 : said(column) ? 1 : column.shaped ? 2 : column.used ? 3 : 4);
    return [...geometry.columns].sort((a, b) => rank(a) - rank(b) || a.position - b.position);
  }

  function drawTokens(group, bottom) {
    const taken = [];
    for (const column of labelOrder()) {
      const x = view.x + column.middle * view.scale;
      if (x < LEFT + 4 || x > view.width - 4) continue;
      if (column.used) group.append(span(column, bottom));
      const apart = graph.amounts?.[column.position].word ? APART[1] : APART[0];
      if (taken.some((other) => Math.abs(other.x - x) < Math.max(apart, other.apart))) continue;
      taken.push({ x, apart });
      group.append(tokenText(column, x, bottom + view.bars + 13));
    }
  }

  function tokenText({ position, used }, x, y) {
    const amount = graph.amounts?.[position].word ?? "";
    // A label hangs to the left of its place, and must not run out of the window there.
    const letters = Math.floor(x / (LETTER * Math.cos((SLOPE * Math.PI) / 180)));
    const fits = letters >= 3 + lettersOf(amount);
    return svg(
      "text",
      {
        class: used || amount ? "axis-token used" : "axis-token",
        "data-position": position,
        transform: `translate(${(x + 3).toFixed(1)},${y}) rotate(${-SLOPE})`,
      },
      shorten(tokenLabel(graph.tokens[position]), Math.min(WORD, fits ? letters - lettersOf(amount) : letters)),
      amount && fits ? svg("tspan", { class: "amount" }, ` ${amount}`) : null,
      svg("title", {}, `${position}: ${tokenExact(graph.tokens[position])}`),
    );
  }

  /** What each token contributes, as a bar above its label: upwards for the root, downwards against it. */
  function drawAmounts(group, bottom) {
    const shares = graph.amounts.map(({ share }) => share);
    const [above, below] = [Math.max(0, ...shares), Math.max(0, ...shares.map((share) => -share))];
    const unit = (view.bars - 8) / (above + below || 1);
    const zero = bottom + 6 + above * unit;
    group.append(svg("line", { class: "axis-zero", x1: LEFT, x2: view.width, y1: zero, y2: zero }));
    for (const column of geometry.columns) {
      const share = shares[column.position];
      const x = view.x + column.middle * view.scale;
      if (Math.abs(share) < LEAST || x < LEFT + 4 || x > view.width - 4) continue;
      group.append(amountBar(x, zero, share * unit, Math.max(3, Math.min(18, 0.5 * column.width * view.scale)), column.position));
    }
  }

  function amountBar(x, zero, height, width, position) {
    const far = zero - height;
    const box = { x: (x - width / 2).toFixed(1), width: width.toFixed(1), y: Math.min(zero, far).toFixed(1), height: Math.abs(height).toFixed(1) };
    const end = { x1: x - width / 2 - 3, x2: x + width / 2 + 3, y1: far, y2: far };
    const against = height < 0;
    const ended = against && graph.amounts[position].word !== "";
    return svg(
      "g",
      { class: against ? "amount-bar opposing" : "amount-bar", "data-position": position },
      svg("rect", box),
      ended ? svg("line", end) : null,
    );
  }

  /** What belongs to a token, as a line above its label: from one end of its column to the other. */
  function span(column, bottom) {
    const [a, b] = [column.x + 4, column.x + column.width - 4].map((x) => Math.max(LEFT, view.x + x * view.scale));
    return svg("line", { class: "axis-span", x1: a.toFixed(1), x2: b.toFixed(1), y1: bottom + 0.5, y2: bottom + 0.5 });
  }

  /** Names that can be read however far the drawing is away; near enough, components carry their own. */
  function tags(places, self = null) {
    if (view.scale >= geometry.readable) return [];
    return nameTags(graph, places, view, [LEFT, view.height - view.bottom], self);
  }

  /** What edges look for, where it covers none of these components and numbers. */
  function words(places, nodes, numbers) {
    if (!worded) return [];
    const [w, h] = [view.width - RIGHT, view.height - view.bottom];
    const taken = [...nodes.filter((place) => !place.dot), ...numbers].map((place) => grown(onScreen(place), 2));
    return wordLabels(graph, places, view, taken, [LEFT, TOP, w, h]);
  }

  function onScreen({ x, y, w, h }) {
    const [left, top] = [view.x + (x - w / 2) * view.scale, view.y + (y - h / 2) * view.scale];
    return [left, top, left + w * view.scale, top + h * view.scale];
  }

  let lit = { nodes: [], edges: [] };
  /** Labels for the nodes (first of all `self`) and edges (by their curves) that are lit up, whatever else is dimmed. */
  function light({ nodes, edges, self = null }) {
    lit = { nodes, edges, self };
    const places = nodes.map((id) => geometry.nodes.get(id)).filter(Boolean);
    parts.litTags.replaceChildren(...tags(places, self));
    parts.litWords.replaceChildren(...words(edges, places, []));
  }

  /** The column under a point of the token axis; null elsewhere. */
  function columnAt(x, y) {
    if (x < LEFT || y < view.height - view.bottom) return null;
    const away = (column) => Math.abs(view.x + column.middle * view.scale - x);
    return geometry.columns.reduce((best, column) => (away(column) < away(best) ? column : best)).position;
  }

  const toWorld = (x, y) => [(x - view.x) / view.scale, (y - view.y) / view.scale];
  const inside = (x, y) => x > LEFT && y < view.height - view.bottom;
  return { view, columnAt, skippedAt, light, room, resize, show, fit, zoom, pan, reveal, toWorld, inside };
}
