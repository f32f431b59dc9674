// Names from afar, where captions are too small to read: labels that keep their size on the screen.

import { svg } from "./dom.js";
import { overlap } from "./layout.js";
import { componentName, mlpLabel } from "./text.js";

const LETTER = 6.4; // given, not measured: a label takes this room in whatever font
const HALF = 6; // of its height
const SPILL = 20; // how far what a head reads may reach out of its outline

/**
 * Labels for heads, then for MLPs, the one that is pointed at (`self`) and the most influential first. A head's short name (H3, its
 * layer stands on the axis) comes before the whole name of another; a head without any is filled, and never an empty box.
 */
export function nameTags(graph, places, view, [left, bottom], self = null) {
  const tags = places.filter((place) => !place.dot).map((place) => tagOf(graph.nodes.get(place.id), place, view));
  const seen = tags.filter(({ names, x, y }) => names && x >= left && y <= bottom);
  const rank = ({ node }) => (node.id === self ? 2 : node.kind === "head" ? 1 : 0) + Math.min(0.99, node.influence ?? 0);
  seen.sort((a, b) => rank(b) - rank(a));
  const kept = [];
  for (const tag of seen) if (!covers(boxOf(tag, tag.names[0]), kept)) kept.push({ ...tag, box: boxOf(tag, tag.names[0]) });
  for (const tag of kept) lengthen(tag, kept, left);
  const named = new Set(kept.map(({ node }) => node.id));
  const nameless = seen.filter(({ node }) => node.kind === "head" && !named.has(node.id));
  return [...nameless.map(filled), ...kept.map(written)];
}

/** The names of a component, from the shortest; null for those that have none. */
function namesOf(node) {
  if (node.members) return [`${node.members.first}-${node.members.last}`, mlpLabel(node)];
  if (node.kind === "mlp") return [String(node.layer)];
  return node.kind === "head" ? [`H${node.head}`, componentName(node), `${componentName(node)} ${node.reads}`] : null;
}

function tagOf(node, { x, y, w, h }, view) {
  const size = { w: w * view.scale, h: h * view.scale };
  return { node, names: namesOf(node), x: view.x + x * view.scale, y: view.y + y * view.scale, ...size };
}

function boxOf({ x, y }, text) {
  const half = (LETTER * text.length) / 2 + 2;
  return [x - half, y - HALF, x + half, y + HALF];
}

function covers(box, tags, own = null) {
  return tags.some((other) => other !== own && overlap(box, other.box));
}

/** Give a component the longest of its names that covers no other, nor the axis. */
function lengthen(tag, kept, left) {
  for (const text of tag.names) {
    const box = boxOf(tag, text);
    if (tag.text && (box[0] < left || covers(box, kept, tag))) return;
    if (text.includes(" ") && box[2] - box[0] > tag.w + SPILL) return;
    Object.assign(tag, { box, text });
  }
}

function written({ node, text, x, y }) {
  const at = { x: x.toFixed(1), y: (y + 3.5).toFixed(1), textLength: LETTER * text.length, lengthAdjust: "spacingAndGlyphs" };
  return svg("text", { class: `tag ${node.kind}`, ...at }, text);
}

function filled({ x, y, w, h }) {
  const box = { x: (x - w / 2).toFixed(1), y: (y - h / 2).toFixed(1), width: w.toFixed(1), height: h.toFixed(1), rx: (h / 2).toFixed(1) };
  return svg("rect", { class: "nameless", ...box });
}
