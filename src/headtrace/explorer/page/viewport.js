// What part of the drawing is seen: fit, zoom, pan; the axes and the labels that keep their size on the screen.

import { svg } from "./dom.js";
import { SIZE, overlap } from "./layout.js";
import { componentName, shorten, tokenExact, tokenLabel } from "./text.js";

const LEFT = 40;
const TOP = 2;
const RIGHT = 10;
const READABLE = 0.66;

export function createViewport(host, parts) {
  const view = { scale: 1, x: 0, y: 0, width: 800, height: 600, bottom: 70, moved: false };
  let geometry = null;
  let graph = null;
  let labelled = [];

  function resize(width, height) {
    Object.assign(view, { width, height });
    for (const layer of parts.layers) layer.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (geometry && !view.moved) fit();
    else apply();
  }

  /** Show a drawing anew: where the view was moved to, or else as a whole. */
  function show(newGraph, newGeometry) {
    [graph, geometry] = [newGraph, newGeometry];
    if (view.moved) apply();
    else fit();
  }

  /** The room between the axes; the lower one is as high as the longest label asks for. */
  function room(tokens) {
    labelled = tokens;
    const longest = Math.max(1, ...tokens.map((token) => [...tokenLabel(token)].length));
    view.bottom = 26 + 4.6 * Math.min(11, longest);
    return [view.width - LEFT - RIGHT, view.height - TOP - view.bottom];
  }

  function fit() {
    view.moved = false;
    const [w, h] = room(labelled);
    view.scale = Math.max(0.05, Math.min(SIZE.closest, w / geometry.width, h / geometry.height));
    view.x = LEFT + (w - geometry.width * view.scale) / 2;
    view.y = TOP + Math.max(0, (h - geometry.height * view.scale) / 2);
    apply();
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
  function apply() {
    const transform = `translate(${view.x.toFixed(2)},${view.y.toFixed(2)}) scale(${view.scale.toFixed(4)})`;
    for (const world of parts.worlds) world.setAttribute("transform", transform);
    host.classList.toggle("far", view.scale < READABLE);
    if (waiting || !geometry) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawAxes();
      parts.tags.replaceChildren(...tags([...geometry.nodes.values()]));
      lightTags(lit);
    });
  }

  function drawAxes() {
    const bottom = view.height - view.bottom;
    const group = svg("g");
    group.append(svg("rect", { class: "axis-ground", x: 0, y: bottom, width: view.width, height: view.bottom }));
    group.append(svg("rect", { class: "axis-ground", x: 0, y: 0, width: LEFT, height: view.height }));
    group.append(svg("line", { class: "axis-line", x1: LEFT, x2: view.width, y1: bottom + 0.5, y2: bottom + 0.5 }));
    let last = Infinity;
    for (const row of [...geometry.rows].reverse()) {
      const y = view.y + row.middle * view.scale;
      if (!row.used || y > bottom - 4 || y < 8 || last - y < 12) continue;
      last = y;
      const name = row.layer < 0 ? "emb" : `L${row.layer}`;
      group.append(svg("text", { class: "axis-layer", x: LEFT - 8, y: y + 3.5 }, name));
    }
    drawTokens(group, bottom);
    parts.axes.replaceChildren(group);
  }

  function drawTokens(group, bottom) {
    const taken = [];
    const order = [...geometry.columns].sort((a, b) => Number(b.used) - Number(a.used) || a.position - b.position);
    for (const column of order) {
      const x = view.x + column.middle * view.scale;
      if (x < LEFT + 4 || x > view.width - 4) continue;
      const label = tokenLabel(graph.tokens[column.position]);
      if (taken.some((other) => Math.abs(other - x) < 15)) continue;
      taken.push(x);
      group.append(
        svg(
          "text",
          {
            class: column.used ? "axis-token used" : "axis-token",
            "data-position": column.position,
            transform: `translate(${(x + 3).toFixed(1)},${bottom + 12}) rotate(-48)`,
          },
          shorten(label, 11),
          svg("title", {}, `${column.position}: ${tokenExact(graph.tokens[column.position])}`),
        ),
      );
    }
  }

  /** From afar the captions are too small to read; the most influential heads then get a label beside them. */
  function tags(places) {
    if (view.scale >= READABLE) return [];
    const influence = (place) => graph.nodes.get(place.id).influence ?? 0;
    const heads = places.filter((place) => !place.dot && graph.nodes.get(place.id).kind === "head");
    const taken = [];
    const made = [];
    for (const place of heads.sort((a, b) => influence(b) - influence(a))) {
      const text = componentName(graph.nodes.get(place.id));
      const textLength = 6.4 * text.length; // given, not measured: the label takes this room in whatever font
      const half = textLength / 2 + 2;
      const [x, y] = [view.x + place.x * view.scale, view.y + place.y * view.scale];
      const box = [x - half, y - 8, x + half, y + 8];
      if (x < LEFT || y > view.height - view.bottom) continue;
      if (taken.some((other) => overlap(box, other))) continue;
      taken.push(box);
      const at = { x: x.toFixed(1), y: (y + 3.5).toFixed(1), textLength, lengthAdjust: "spacingAndGlyphs" };
      made.push(svg("text", { class: "tag", ...at }, text));
    }
    return made;
  }

  let lit = [];
  /** Labels for the nodes that are lit up, whatever else is dimmed. */
  function lightTags(ids) {
    lit = ids;
    parts.litTags.replaceChildren(...tags(ids.map((id) => geometry.nodes.get(id)).filter(Boolean)));
  }

  /** The column under a point of the token axis; null elsewhere. */
  function columnAt(x, y) {
    if (x < LEFT || y < view.height - view.bottom) return null;
    const away = (column) => Math.abs(view.x + column.middle * view.scale - x);
    return geometry.columns.reduce((best, column) => (away(column) < away(best) ? column : best)).position;
  }

  const toWorld = (x, y) => [(x - view.x) / view.scale, (y - view.y) / view.scale];
  const inside = (x, y) => x > LEFT && y < view.height - view.bottom;
  return { view, columnAt, lightTags, room, resize, show, fit, zoom, pan, reveal, toWorld, inside };
}
