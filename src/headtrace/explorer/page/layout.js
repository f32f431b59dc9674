// Where everything goes. layout() is a pure function of the graph and of which edges are drawn one by one: no DOM,
// no clock, no chance. Positions become columns, layers become rows; a component sits in the cell of its position
// and layer. Components with an edge that is drawn get their full shape, the others a dot.

import { KINDS, SIDES } from "./graph.js";

export const SIZE = {
  dot: 6,
  dotPitch: 9,
  gap: 8,
  perLine: 3,
  dotsPerLine: 6,
  rowGap: 4,
  emptyRow: 4,
  emptyColumn: [8, 24],
  emptyColumns: 480,
  gutter: 44,
  margin: 14,
  closest: 1.25,
};

const ORDER = Object.keys(KINDS);
const EMBEDDING_ROW = -1;

/**
 * `room` is the size of the window: rows and columns are spread out to fill its shape, never squeezed.
 * `beside`, a graph and its edges, is laid out in the same rows (and columns, if it has as many tokens).
 */
export function layout(graph, { shown, rest }, room = [0, 0], beside = null) {
  const own = fillCells(graph, { shown, rest });
  const other = beside ? fillCells(beside.graph, beside.selection) : new Map();
  const tall = [...own.values(), ...other.values()];
  const wide = beside && beside.graph.tokens.length === graph.tokens.length ? tall : [...own.values()];
  const top = Math.max(graph.layers[1], beside?.graph.layers[1] ?? 0);
  const aspect = room[1] > 0 ? room[0] / room[1] : 0;
  const least = placeRows(top, tall, 0).height;
  const columns = placeColumns(graph, wide, Math.max(room[0] / SIZE.closest, aspect * least));
  const width = right(columns);
  // From afar the root would be too small to read: it is enlarged by about as much as everything is shrunk.
  const enlarged = room[1] > 0 ? Math.max(1, Math.min(10, 0.75 * Math.max(width / room[0], least / room[1]))) : 1;
  const rows = placeRows(top, tall, Math.max(room[1] / SIZE.closest, aspect && width / aspect), enlarged);
  const height = rows.height;
  const nodes = placeNodes(graph, own, columns, rows, width);
  if (graph.root) nodes.set(graph.root.id, placeRoot(graph, columns, width, enlarged));
  return {
    width: Math.max(width, rootWidth(graph) + 2 * SIZE.margin),
    height,
    columns,
    rows: rows.list,
    nodes,
    edges: shown.map((edge) => placeEdge(graph, nodes, edge)),
    bundles: bundle(nodes, rest, [width / 12, height / 5]),
    sources: placeSources(graph, nodes, columns),
  };
}

function right(columns) {
  const last = columns[columns.length - 1];
  return last ? last.x + last.width + SIZE.margin : 0;
}

function rowOf(node) {
  return node.layer === null ? EMBEDDING_ROW : node.layer;
}

function fillCells(graph, { shown, rest }) {
  const full = new Set();
  for (const edge of shown) full.add(edge.source).add(edge.target);
  const alive = new Set(full);
  for (const edge of rest) alive.add(edge.source).add(edge.target);
  const cells = new Map();
  for (const node of graph.nodes.values()) {
    if (node.kind === "root" || !alive.has(node.id)) continue;
    const key = `${node.dest}:${rowOf(node)}`;
    if (!cells.has(key)) cells.set(key, { position: node.dest, row: rowOf(node), full: [], dots: [] });
    cells.get(key)[full.has(node.id) ? "full" : "dots"].push(node);
  }
  const order = (a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind) || (a.head ?? 0) - (b.head ?? 0) || (a.src ?? 0) - (b.src ?? 0);
  for (const cell of cells.values()) {
    cell.full.sort(order);
    cell.dots.sort(order);
    cell.lines = chunks(cell.full, SIZE.perLine);
    cell.dotLines = chunks(cell.dots, SIZE.dotsPerLine);
    const widths = cell.lines.map((line) => lineWidth(line));
    const dots = Math.min(cell.dots.length, SIZE.dotsPerLine) * SIZE.dotPitch;
    cell.width = Math.max(0, dots, ...widths);
    cell.height =
      cell.lines.reduce((sum, line) => sum + lineHeight(line) + 2, 0) + cell.dotLines.length * SIZE.dotPitch;
  }
  return cells;
}

function chunks(list, size) {
  const lines = Math.ceil(list.length / size);
  const even = Math.ceil(list.length / Math.max(1, lines));
  return Array.from({ length: lines }, (_, i) => list.slice(i * even, (i + 1) * even));
}

function lineWidth(line) {
  return line.reduce((sum, node) => sum + KINDS[node.kind].size[0], 0) + SIZE.gap * (line.length - 1);
}

function lineHeight(line) {
  return Math.max(...line.map((node) => KINDS[node.kind].size[1]));
}

function placeColumns(graph, cells, room) {
  const widths = new Array(graph.tokens.length).fill(0);
  const shaped = new Array(graph.tokens.length).fill(false);
  for (const cell of cells) {
    widths[cell.position] = Math.max(widths[cell.position], cell.width);
    shaped[cell.position] ||= cell.full.length > 0;
  }
  // Columns where nothing happens share a certain width, so that a long prompt leaves room for what does happen.
  const [least, most] = SIZE.emptyColumn;
  const empty = Math.max(least, Math.min(most, SIZE.emptyColumns / widths.filter((content) => content === 0).length));
  const needed = widths.map((content, position) => {
    const side = shaped[position] ? SIZE.gutter : 14;
    return content === 0 ? empty : Math.max(most, content + side);
  });
  const shares = widths.map((content) => (content > 0 ? 2.5 : empty / most));
  const spare = Math.max(0, room - 2 * SIZE.margin - sum(needed)) / Math.max(1, sum(shares));
  let x = SIZE.margin;
  return widths.map((content, position) => {
    const width = needed[position] + spare * shares[position];
    const column = { position, x, width, middle: x + width / 2, used: content > 0, shaped: shaped[position] };
    x += width;
    return column;
  });
}

function sum(numbers) {
  return numbers.reduce((total, value) => total + value, 0);
}

function placeRows(highest, cells, room, enlarged = 1) {
  const heights = new Map();
  for (const cell of cells) heights.set(cell.row, Math.max(heights.get(cell.row) ?? 0, cell.height));
  const top = SIZE.margin + enlarged * (KINDS.root.size[1] + 28);
  const layers = Array.from({ length: highest + 2 }, (_, i) => highest - i);
  const needed = layers.map((row) => (heights.has(row) ? heights.get(row) + SIZE.rowGap : SIZE.emptyRow));
  const spare = Math.max(0, room - top - SIZE.margin - sum(needed)) / Math.max(1, heights.size);
  const list = [];
  let y = top;
  layers.forEach((row, i) => {
    const content = heights.get(row) ?? 0;
    const height = needed[i] + (content > 0 ? Math.min(spare, 60 * enlarged) : 0);
    list.push({ layer: row, y, height, middle: y + height / 2, used: content > 0 });
    y += height;
  });
  return { list, height: y + SIZE.margin };
}

function placeNodes(graph, cells, columns, rows, width) {
  const byLayer = new Map(rows.list.map((row) => [row.layer, row]));
  const nodes = new Map();
  for (const cell of cells.values()) {
    const column = columns[cell.position];
    const row = byLayer.get(cell.row);
    let y = row.middle - cell.height / 2;
    for (const line of cell.lines) {
      const tall = lineHeight(line);
      let x = column.middle - lineWidth(line) / 2;
      for (const node of line) {
        const [w, h] = KINDS[node.kind].size;
        nodes.set(node.id, { id: node.id, x: x + w / 2, y: y + 1 + tall / 2, w, h, dot: false });
        x += w + SIZE.gap;
      }
      y += tall + 2;
    }
    for (const line of cell.dotLines) {
      const start = column.middle - ((line.length - 1) * SIZE.dotPitch) / 2;
      line.forEach((node, i) => {
        const place = { x: start + i * SIZE.dotPitch, y: y + SIZE.dotPitch / 2, w: SIZE.dot, h: SIZE.dot };
        nodes.set(node.id, { id: node.id, ...place, dot: true });
      });
      y += SIZE.dotPitch;
    }
  }
  return nodes;
}

function rootWidth(graph) {
  return Math.max(150, Math.min(KINDS.root.size[0] + 60, 8.4 * [...graph.data.question].length + 44));
}

function placeRoot(graph, columns, width, enlarged) {
  const [w, h] = [enlarged * rootWidth(graph), enlarged * KINDS.root.size[1]];
  const at = graph.data.root.position ?? graph.tokens.length - 1;
  const middle = columns[at]?.middle ?? width / 2;
  const limit = Math.max(width, w + 2 * SIZE.margin) - SIZE.margin - w / 2;
  const x = Math.max(SIZE.margin + w / 2, Math.min(limit, middle));
  return { id: graph.root.id, x, y: SIZE.margin + h / 2, w, h, dot: false, enlarged };
}

/** A cubic curve from the source up into the target: each side enters at its own place. */
function placeEdge(graph, nodes, edge) {
  const [source, target] = [nodes.get(edge.source), nodes.get(edge.target)];
  return { index: edge.index, ...curve(source, target, edge.side, inOneColumn(graph, edge)) };
}

export function inOneColumn(graph, edge) {
  const [source, target] = [graph.nodes.get(edge.source), graph.nodes.get(edge.target)];
  return source.dest === (target.dest ?? graph.data.root.position ?? graph.tokens.length - 1);
}

export function curve(source, target, side, sameColumn) {
  const { port } = SIDES[side];
  const right = port === null ? clamp((source.x - target.x) * 0.5, target.w * 0.4) : port * target.w;
  const [x3, y3] = [target.x + right, target.y + target.h / 2];
  const rise = Math.max(12, source.y - y3);
  if (sameColumn) {
    // Within a column an edge swings out, so that it does not run over the components between its ends.
    const out = port > 0 ? 1 : -1;
    const swing = out * (10 + Math.min(64, 0.16 * rise));
    const [x0, y0] = [source.x + (out * source.w) / 2, source.y];
    const outer = out > 0 ? Math.max(x0, x3) : Math.min(x0, x3);
    return { x0, y0, x1: x0 + swing, y1: y0 - 0.3 * rise, x2: outer + swing, y2: y3 + 0.5 * rise, x3, y3 };
  }
  const [x0, y0] = [source.x, source.y - source.h / 2];
  const bend = Math.max(14, 0.48 * (y0 - y3));
  return { x0, y0, x1: x0, y1: y0 - bend, x2: x3, y2: y3 + bend, x3, y3 };
}

function clamp(value, most) {
  return Math.max(-most, Math.min(most, value));
}

/** Whether two boxes [left, top, right, bottom] have a part in common. */
export function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}

/** A point of a curve at t in [0, 1]. */
export function pointOn(c, t) {
  const s = 1 - t;
  const [a, b, d, e] = [s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t];
  return [a * c.x0 + b * c.x1 + d * c.x2 + e * c.x3, a * c.y0 + b * c.y1 + d * c.y2 + e * c.y3];
}

/** Edges that are not drawn one by one become faint bundles: neighbouring columns and layers, same side. */
function bundle(nodes, rest, [stepX, stepY]) {
  const groups = new Map();
  for (const edge of rest) {
    const [source, target] = [nodes.get(edge.source), nodes.get(edge.target)];
    const near = (place, tall) => [Math.floor(place.x / stepX), Math.floor(place.y / (tall * stepY))];
    const key = [...near(source, 2), ...near(target, 1), edge.side].join();
    if (!groups.has(key)) groups.set(key, { side: edge.side, edges: [], flow: 0, s: [0, 0], t: [0, 0] });
    const group = groups.get(key);
    group.edges.push(edge.index);
    group.flow += edge.flow;
    group.s[0] += source.x;
    group.s[1] += source.y;
    group.t[0] += target.x;
    group.t[1] += target.y;
  }
  return [...groups.values()].map(({ side, edges, flow, s, t }) => {
    const n = edges.length;
    const [source, target] = [s, t].map(([x, y]) => ({ x: x / n, y: y / n, w: 8, h: 8 }));
    return { side, edges, flow, ...curve(source, target, side, Math.abs(source.x - target.x) < 30) };
  });
}

/** The source of every head that has its full shape: a mark in the source's column, at the head's height. */
function placeSources(graph, nodes, columns) {
  const marks = [];
  for (const place of nodes.values()) {
    const node = graph.nodes.get(place.id);
    if (place.dot || node.kind !== "head" || node.src === node.dest) continue;
    marks.push({ id: node.id, x: columns[node.src].middle, y: place.y, headX: place.x - place.w / 2 });
  }
  return marks;
}
