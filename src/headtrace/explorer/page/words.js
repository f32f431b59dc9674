// Words on the drawing: what the strongest signals look for, beside their lines, wherever there is room.

import { svg } from "./dom.js";
import { overlap, pointOn } from "./layout.js";
import { componentName, inert, shorten } from "./text.js";

const FONT = 11; // pixels of the screen, however far the drawing is away
const LINE = 13;
const WIDEST = 196;
const LINES = 3;
const PADDING = [6, 3];
const APART = 3; // between labels, and between a label and a component
const MOST = 40; // labels that are tried
const LONGEST = 300; // letters that are looked at
const ALONG = [0.62, 0.5, 0.74, 0.4, 0.84, 0.3, 0.2, 0.56, 0.68, 0.45, 0.79, 0.35, 0.9, 0.25];
/** How a label stands on a point of its line, in widths and heights: in the middle, beside it, above or below it. */
const STANDS = [[-0.5, -0.5], [-0.04, -0.5], [-0.96, -0.5], [-0.5, -0.9], [-0.5, -0.1], [-0.96, -0.9], [-0.04, -0.1]];

/** Quoted tokens in words, which no line breaks; where there is little room, without the space that they begin with. */
export function readable(text, brief = false) {
  const whole = (token) => (brief && token.trim() ? token.trimStart() : token).replaceAll(" ", "\u00a0");
  return text.replace(/"([^"]*)"/g, (_, token) => `“${whole(token)}”`);
}

/** Whether any edge of a circuit says something. */
export function hasWords(graph) {
  return graph.edges.some((edge) => edge.description);
}

/** Words that were tested, and did not pass. */
export function unsupported(edge) {
  return Boolean(edge.evidence) && !edge.evidence.supported;
}

/** What a head was found to look for: the words of its strongest signals, each once, supported ones first. */
export function wordsOf(node) {
  const said = new Map();
  for (const edge of node.into) if (edge.description && !said.has(edge.description)) said.set(edge.description, edge);
  return [...said.values()].sort((a, b) => unsupported(a) - unsupported(b));
}

/** One label for each head before any gets a second; supported words first, then strength. */
function inTurns(graph, places) {
  const counts = new Map();
  const doubtful = ({ index }) => unsupported(graph.edges[index]);
  const sorted = [...places].sort((a, b) => doubtful(a) - doubtful(b));
  const turns = sorted.map((place) => {
    const { target } = graph.edges[place.index];
    counts.set(target, (counts.get(target) ?? -1) + 1);
    return { place, turn: counts.get(target) };
  });
  return turns.sort((a, b) => a.turn - b.turn || doubtful(a.place) - doubtful(b.place)).map(({ place }) => place);
}

/**
 * Labels for edges, head by head. `places` are curves in the drawing, `taken` boxes on the screen that must stay free,
 * `frame` is the box for all of them. The same words into the same head are said once.
 */
export function wordLabels(graph, places, view, taken, frame) {
  const boxes = taken.filter((box) => overlap(box, frame));
  const said = new Set();
  const made = [];
  const order = inTurns(graph, places.filter(({ index }) => graph.edges[index].description)).slice(0, MOST);
  const widest = Math.min(WIDEST, 0.4 * (frame[2] - frame[0]));
  for (const place of order) {
    const edge = graph.edges[place.index];
    const key = `${edge.target} ${edge.description}`;
    if (said.has(key)) continue;
    const name = componentName(graph.nodes.get(edge.target));
    if (edge.label?.widest !== widest) {
      edge.label = { widest, lines: wrapped(`${name} ${labelText(edge)}`, widest - name.length) }; // the name is bold
    }
    const { lines } = edge.label;
    const found = roomFor(lines, place, view, boxes, frame);
    if (!found) continue;
    said.add(key);
    boxes.push(grown(found.box, APART));
    made.push(label(edge, name, lines, found));
  }
  return made;
}

function labelText(edge) {
  const text = inert(readable(edge.description.slice(0, LONGEST).trim(), true)).replace(/\.$/, "");
  return unsupported(edge) ? `? ${text}` : text;
}

/** The first place along an edge where a label covers nothing; null if there is none. */
function roomFor(lines, place, view, boxes, frame) {
  const w = Math.max(...lines.map((line, i) => widthOf(line) + (i ? 0 : 8))) + 2 * PADDING[0];
  const h = LINE * lines.length + 2 * PADDING[1];
  const points = ALONG.map((t) => pointOn(place, t)).map(([x, y]) => [view.x + x * view.scale, view.y + y * view.scale]);
  for (const [across, down] of STANDS) {
    for (const [x, y] of points) {
      const [left, top] = [x + across * w, y + down * h];
      const box = [left, top, left + w, top + h];
      if (box[0] < frame[0] || box[1] < frame[1] || box[2] > frame[2] || box[3] > frame[3]) continue;
      if (!boxes.some((other) => overlap(box, other))) return { box, w, h };
    }
  }
  return null;
}

function label(edge, name, lines, { box: [left, top], w, h }) {
  const failed = unsupported(edge) ? " unsupported" : "";
  const shared = edge.shared ? " shared" : "";
  const said = [[svg("tspan", { class: "whose" }, name), lines[0].slice(name.length)], ...lines.slice(1).map((line) => [line])];
  const text = said.map((line, i) => svg("text", { x: PADDING[0], y: PADDING[1] + LINE * (i + 1) - 3.2 }, ...line));
  const at = { class: `word ${edge.side}${failed}${shared}`, "data-index": edge.index, transform: `translate(${left.toFixed(1)},${top.toFixed(1)})` };
  return svg("g", at, svg("rect", { width: w.toFixed(1), height: h, rx: 5 }), ...text);
}

export function grown([left, top, right, bottom], by) {
  return [left - by, top - by, right + by, bottom + by];
}

/** Text in at most three lines of a width; what does not fit is an ellipsis. */
function wrapped(text, width) {
  const lines = [""];
  const words = text.split(" ");
  for (const [i, word] of words.entries()) {
    const line = lines[lines.length - 1];
    const longer = line ? `${line} ${word}` : word;
    if (widthOf(longer) <= width) lines[lines.length - 1] = longer;
    else if (lines.length < LINES && line) lines.push(cut(word, width));
    else {
      lines[lines.length - 1] = cut(longer, width, i < words.length - 1);
      break;
    }
  }
  return lines;
}

/** As much of a text as fits, with an ellipsis where something is missing. */
function cut(text, width, missing = false) {
  if (widthOf(text) <= width && !missing) return text;
  let length = [...text].length;
  while (length > 1 && widthOf(`${shorten(text, length)}…`) > width) length -= 1;
  return `${shorten(text, length).replace(/…$/, "")}…`;
}

let pen = null;

/** How wide a text is on the screen, in the letters of a label. */
function widthOf(text) {
  if (!pen) {
    pen = document.createElement("canvas").getContext("2d");
    pen.font = `${FONT}px ${getComputedStyle(document.body).fontFamily}`;
  }
  return pen.measureText(text).width;
}
