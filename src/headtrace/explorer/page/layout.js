// Where everything goes. layout() is a pure function of the graph and of which edges are drawn one by one: no DOM,
// no clock, no chance. Positions become columns, layers become rows; a component sits in the cell of its position
// and layer. Components with an edge that is drawn get their full shape, the others a dot.

import { KINDS, SIDES } from "./graph.js";
import { widthOf } from "./text.js";

export const SIZE = {
  dot: 6,
  dotPitch: 9,
  gap: 8,
  lane: 30,
  laneMost: 150,
  rowGap: 4,
  rowMost: 150,
  emptyRow: 4,
  skipped: [12, 28],
  emptyColumn: [2, 24],
  emptyColumns: 300,
  saidColumn: 36,
  margin: 14,
  closest: 1.25,
  letter: 7.6,
  readLetter: 6.6,
};

/** How a component can be drawn: with all it says, in one line, or with its name alone. `readable`: the least scale of
 * its text. */
const FORMS = {
  full: { worth: 1, readable: 1 },
  compact: { worth: 0.95, readable: 0.92 },
  brief: { worth: 0.72, readable: 0.88 },
};
const UNREADABLE = 0.45;
const LANES = 1.15;
/** A column gets lanes once so many edges end in it. */
const BUSY = 6;
/** Components side by side in a cell, and dots. */
const LINES = [[3, 6], [2, 4], [1, 3], [6, 12]];
/** Room beside a column's components for the edges that pass, and what a tighter fit is worth. */
const GUTTERS = [[44, 1], [20, 0.94], [8, 0.88]];
const DOTS_BETWEEN = 3; // lanes
const DOTS_ALONE = 8; // side by side, in a cell that holds nothing else
const ORDER = Object.keys(KINDS);
const EMBEDDING_ROW = -1;

/**
 * `room` is the size of the window: of several plans the one is taken that can be read best in it, and its rows and
 * columns are spread out to fill its shape, never squeezed.
 * `beside`, a graph and its edges, is laid out in the same rows (and columns, if it has as many tokens).
 */
export function layout(graph, { shown, rest }, room = [0, 0], beside = null) {
  const own = fillCells(graph, { shown, rest });
  const other = beside ? fillCells(beside.graph, beside.selection) : [];
  const tall = [...own, ...other];
  const wide = beside && beside.graph.tokens.length === graph.tokens.length ? tall : own;
  const top = Math.max(graph.layers[1], beside?.graph.layers[1] ?? 0);
  const drawings = wide === own && beside ? [[graph, own], [beside.graph, other]] : [[graph, wide]];
  const loads = edgesInto(graph, shown);
  const plan = bestPlan(drawings, tall, top, room, beside ? [] : loads);
  const aspect = room[1] > 0 ? room[0] / room[1] : 0;
  for (const cell of tall) measure(cell, plan);
  const least = placeRows(top, tall, 0).height;
  const columns = placeColumns(held(graph, wide), plan, Math.max(room[0] / SIZE.closest, aspect * least), loads);
  // Side by side, rows are to be the same in both drawings, so their cells are left as they are.
  if (!beside) placeLanes(columns, plan);
  for (const cell of own) if (columns[cell.position].lanes) measure(cell, plan, true);
  const width = right(columns);
  // From afar the root would be too small to read: it is enlarged by as much as everything is shrunk.
  const shrunk = room[1] > 0 ? Math.max(width / room[0], least / room[1]) : 1;
  const enlarged = Math.max(1, Math.min(10, shrunk));
  const rows = placeRows(top, tall, Math.max(room[1] / SIZE.closest, aspect && width / aspect), enlarged);
  const nodes = placeNodes(own, columns, rows, plan);
  if (graph.root) nodes.set(graph.root.id, placeRoot(graph, columns, width, enlarged));
  const edges = shown.map((edge) => placeEdge(graph, nodes, edge));
  return {
    width: edges.reduce((far, edge) => Math.max(far, rightmost(edge)), Math.max(width, enlarged * rootWidth(graph) + 2 * SIZE.margin)),
    height: rows.height,
    form: plan.form,
    readable: FORMS[plan.form].readable,
    columns,
    rows: rows.list,
    nodes,
    edges,
    bundles: bundle(nodes, rest, [width / 12, rows.height / 5]),
    sources: placeSources(graph, nodes, columns),
  };
}

/**
 * The plan in which text comes out largest in the room there is; drawings side by side have one plan. Cells are measured
 * once for each form and number of components in a line; all else is adding up.
 */
function bestPlan(drawings, tall, top, room, loads) {
  const longest = Math.max(...drawings.map(([graph]) => graph.longestHead));
  const lanes = loads.some((load) => load >= BUSY) ? [true, false] : [false];
  let best = null;
  for (const form of Object.keys(FORMS)) {
    const sizes = sizesOf(form, longest);
    for (const [perLine, dotsPerLine] of LINES) {
      for (const cell of tall) measure(cell, { sizes, perLine, dotsPerLine });
      const height = placeRows(top, tall, 0).height;
      const holds = drawings.map(([graph, cells]) => held(graph, cells));
      for (const [gutter, loose] of GUTTERS) {
        for (const laned of lanes) {
          const plan = { form, sizes, perLine, dotsPerLine, gutter, lanes: laned };
          if (!(room[0] > 0 && room[1] > 0)) return plan;
          const width = Math.max(...holds.map((columns) => sum(columnNeeds(columns, plan, loads)))) + 2 * SIZE.margin;
          const scale = Math.min(1, room[0] / width, room[1] / height);
          const { worth, readable } = FORMS[form];
          // Names that are too small are written over the drawing, whatever its form: then room is all that counts.
          const value = scale * loose * (laned ? LANES : 1) * (scale < readable ? UNREADABLE : worth);
          if (!best || value > best.value) best = { plan, value };
        }
      }
    }
  }
  return best.plan;
}

function sizesOf(form, longest) {
  const sizes = Object.fromEntries(Object.entries(KINDS).map(([kind, { size }]) => [kind, size]));
  sizes.folded = [82, 20];
  return form === "full" ? sizes : { ...sizes, head: [SIZE.letter * longest + 12, 19], mlp: [22, 18], inLine: form === "compact" };
}

/** The width and height of a component: MLPs that are folded into one need room for the first and the last, and a head in
 * one line for what it reads. */
function sizeOf(node, sizes) {
  const [w, h] = sizes[node.members ? "folded" : node.kind];
  return sizes.inLine && node.kind === "head" ? [w + 6 + SIZE.readLetter * node.reads.length, h] : [w, h];
}

/** How many of the drawn edges end in each column: they need room there. */
function edgesInto(graph, shown) {
  const counts = new Array(graph.tokens.length).fill(0);
  for (const edge of shown) {
    const at = graph.nodes.get(edge.target).dest;
    if (at !== null) counts[at] += 1;
  }
  return counts;
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
    cell.heads = cell.full.filter((node) => node.kind === "head");
    cell.leaves = cell.full.filter((node) => node.kind !== "head");
  }
  return [...cells.values()];
}

/** How wide and high a cell is: its components in one block, or heads and the rest each in a lane of their own. */
function measure(cell, plan, lanes = false) {
  cell.blocks = lanes ? [cell.heads, cell.leaves] : [cell.full];
  [cell.shapes, cell.width] = [0, 0];
  for (const nodes of cell.blocks) {
    const [width, height] = blockSize(nodes, plan);
    cell.width = Math.max(cell.width, width);
    cell.shapes = Math.max(cell.shapes, height);
  }
  measureDots(cell, plan, lanes);
  cell.laneWidths = [blockSize(cell.heads, plan)[0], blockSize(cell.leaves, plan)[0]];
}

/** Dots stand beside the shapes of their cell, or between its lanes, so that they take no height of their own. */
function measureDots(cell, plan, lanes) {
  const count = cell.dots.length;
  const beside = Math.ceil(count / Math.max(1, Math.floor(cell.shapes / SIZE.dotPitch)));
  cell.dotsInLine = Math.max(1, cell.shapes === 0 ? Math.max(DOTS_ALONE, plan.dotsPerLine) : lanes ? DOTS_BETWEEN : beside);
  cell.dotsHeight = Math.ceil(count / cell.dotsInLine) * SIZE.dotPitch;
  cell.dotsWidth = Math.min(count, cell.dotsInLine) * SIZE.dotPitch + (count && cell.shapes ? SIZE.gap / 2 : 0);
  cell.height = Math.max(cell.shapes, cell.dotsHeight);
  if (!lanes) cell.width += cell.dotsWidth;
}

/** The width of the widest line of a block, and the height of all its lines. */
function blockSize(nodes, { sizes, perLine }) {
  const even = lineLength(nodes.length, perLine);
  let [width, height] = [0, 0];
  for (let first = 0; first < nodes.length; first += even) {
    const end = Math.min(nodes.length, first + even);
    let [across, tall] = [SIZE.gap * (end - first - 1), 0];
    for (let i = first; i < end; i++) {
      const [w, h] = sizeOf(nodes[i], sizes);
      across += w;
      tall = Math.max(tall, h);
    }
    width = Math.max(width, across);
    height += tall + 2;
  }
  return [width, height];
}

/** Lines as long as each other, of at most so many. */
function lineLength(count, most) {
  return Math.ceil(count / Math.max(1, Math.ceil(count / most)));
}

function chunks(list, most) {
  const even = lineLength(list.length, most);
  return Array.from({ length: Math.ceil(list.length / (even || 1)) }, (_, i) => list.slice(i * even, (i + 1) * even));
}

function lineWidth(line, plan) {
  return sum(line.map((node) => sizeOf(node, plan.sizes)[0])) + SIZE.gap * (line.length - 1);
}

function lineHeight(line, plan) {
  return Math.max(...line.map((node) => sizeOf(node, plan.sizes)[1]));
}

/** What each column holds: how wide, how many components with a shape, how wide as two lanes, if its token has a number. */
function held(graph, cells) {
  const said = (position) => Boolean(graph.amounts?.[position].word);
  const columns = graph.tokens.map((_, position) => ({ width: 0, count: 0, lanes: [0, 0], said: said(position) }));
  for (const cell of cells) {
    const column = columns[cell.position];
    column.width = Math.max(column.width, cell.width);
    column.count += cell.full.length;
    column.lanes = column.lanes.map((width, i) => Math.max(width, cell.laneWidths[i]));
  }
  return columns;
}

/** Columns where nothing happens share a certain width, so that a long prompt leaves room for what does happen. */
function emptyWidth(columns, plan) {
  const [least, most] = SIZE.emptyColumn;
  const share = SIZE.emptyColumns / columns.filter(({ width }) => width === 0).length;
  return Math.max(least, Math.min(most, plan.gutter, share));
}

/** The least width of each column. */
function columnNeeds(columns, plan, loads) {
  const empty = emptyWidth(columns, plan);
  return columns.map(({ width, count, lanes: [heads, leaves], said }, i) => {
    const least = said ? Math.max(empty, SIZE.saidColumn) : empty;
    if (width === 0) return least;
    const two = plan.lanes && heads && leaves && loads[i] >= BUSY ? heads + leaves + SIZE.lane + 20 : 0;
    return Math.max(least, two, width + (count ? plan.gutter : Math.min(14, plan.gutter)));
  });
}

/** Columns as wide as what they hold; room to spare goes where most components are and most edges end. */
function placeColumns(columns, plan, room, loads) {
  const needed = columnNeeds(columns, plan, loads);
  const empty = emptyWidth(columns, plan) / SIZE.emptyColumn[1];
  const shares = columns.map(({ width, count }, i) => (width > 0 ? 0.6 + Math.sqrt(count + loads[i]) : empty));
  const spare = Math.max(0, room - 2 * SIZE.margin - sum(needed)) / Math.max(1, sum(shares));
  let x = SIZE.margin;
  return columns.map(({ width: content, count, lanes }, position) => {
    const width = needed[position] + spare * shares[position];
    const column = { position, x, width, middle: x + width / 2, used: content > 0, shaped: count > 0, laneWidths: lanes, lanes: null };
    x += width;
    return column;
  });
}

/** A column that is wide enough gets two lanes, by their middles: heads at the left, what they rest on at the right. */
function placeLanes(columns, plan) {
  for (const column of columns) {
    const [heads, leaves] = column.laneWidths;
    const free = column.width - heads - leaves;
    if (!heads || !leaves || free < SIZE.lane + Math.max(plan.gutter, 20)) continue;
    const between = Math.min(SIZE.laneMost, Math.max(SIZE.lane, 0.45 * free));
    const left = column.x + (free - between) / 2;
    column.lanes = [left + heads / 2, left + heads + between + leaves / 2];
  }
}

function sum(numbers) {
  return numbers.reduce((total, value) => total + value, 0);
}

function placeRows(highest, cells, room, enlarged = 1) {
  const heights = new Map();
  for (const cell of cells) heights.set(cell.row, Math.max(heights.get(cell.row) ?? 0, cell.height));
  const top = SIZE.margin + enlarged * (KINDS.root.size[1] + 28);
  const layers = Array.from({ length: highest + 2 }, (_, i) => highest - i);
  const skipped = skippedRows(layers, heights);
  const shaped = new Set(cells.filter(({ shapes }) => shapes > 0).map(({ row }) => row));
  const needed = layers.map((row) => (heights.has(row) ? heights.get(row) + (shaped.has(row) ? SIZE.rowGap : 0) : (skipped.get(row) ?? SIZE.emptyRow)));
  const spare = Math.max(0, room - top - SIZE.margin - sum(needed)) / Math.max(1, heights.size);
  const list = [];
  let y = top;
  layers.forEach((row, i) => {
    const used = heights.has(row);
    const height = needed[i] + (used ? Math.min(spare, SIZE.rowMost * enlarged) : 0);
    list.push({ layer: row, y, height, middle: y + height / 2, used, skipped: skipped.has(row) });
    y += height;
  });
  return { list, height: y + SIZE.margin };
}

/** Layers below the highest that hold nothing, each with its height: a run of them is as high as its mark needs. */
function skippedRows(layers, heights) {
  const found = new Map();
  let run = [];
  const close = () => {
    const [least, most] = SIZE.skipped;
    for (const row of run) found.set(row, Math.max(least, Math.min(most, SIZE.emptyRow * run.length)) / run.length);
    run = [];
  };
  for (const row of layers) {
    if (row === EMBEDDING_ROW || heights.has(row)) close();
    else if (heights.size) run.push(row);
  }
  return found;
}

function placeNodes(cells, columns, rows, plan) {
  const byLayer = new Map(rows.list.map((row) => [row.layer, row]));
  const nodes = new Map();
  for (const cell of cells) {
    const column = columns[cell.position];
    const { middle: level } = byLayer.get(cell.row);
    const laned = cell.blocks.length > 1;
    const beside = cell.shapes > 0 && !laned;
    const shift = beside ? cell.dotsWidth / 2 : 0;
    cell.blocks.forEach((block, i) => {
      const middle = laned ? column.lanes[i] : column.middle - shift;
      const lines = chunks(block, plan.perLine);
      placeLines(nodes, lines, middle, level - blockSize(block, plan)[1] / 2, { plan, lane: i });
    });
    const dotsMiddle = middleOfDots(cell, column, plan, shift);
    chunks(cell.dots, cell.dotsInLine).forEach((line, i) => {
      const start = dotsMiddle - ((line.length - 1) * SIZE.dotPitch) / 2;
      const y = level - cell.dotsHeight / 2 + (i + 0.5) * SIZE.dotPitch;
      line.forEach((node, j) => {
        nodes.set(node.id, { id: node.id, x: start + j * SIZE.dotPitch, y, w: SIZE.dot, h: SIZE.dot, dot: true });
      });
    });
  }
  return nodes;
}

/** Where a cell's dots stand: beside its shapes, between the shapes of its lanes, or in the middle of its column. */
function middleOfDots(cell, column, plan, shift) {
  const widths = cell.blocks.map((block) => blockSize(block, plan)[0]);
  if (widths.length > 1) return (column.lanes[0] + widths[0] / 2 + column.lanes[1] - widths[1] / 2) / 2;
  return cell.shapes ? column.middle - shift + (widths[0] + cell.dotsWidth + SIZE.gap / 2) / 2 : column.middle;
}

function placeLines(nodes, lines, middle, top, { plan, lane }) {
  const how = { dot: false, form: plan.form, lane, swing: 20 + plan.gutter };
  let y = top;
  for (const line of lines) {
    const tall = lineHeight(line, plan);
    let x = middle - lineWidth(line, plan) / 2;
    for (const node of line) {
      const [w, h] = sizeOf(node, plan.sizes);
      nodes.set(node.id, { id: node.id, x: x + w / 2, y: y + 1 + tall / 2, w, h, ...how });
      x += w + SIZE.gap;
    }
    y += tall + 2;
  }
}

function rootWidth(graph) {
  return Math.max(150, widthOf(graph.caption) + 40);
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
export function placeEdge(graph, nodes, edge) {
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
  if (sameColumn && side !== "root" && Math.abs(source.x - target.x) > (source.w + target.w) / 2) {
    // From lane to lane it leaves sideways, so that it does not run over its neighbours in the lane.
    const [x0, y0] = [source.x + (Math.sign(target.x - source.x) * source.w) / 2, source.y];
    return { x0, y0, x1: x0 + 0.6 * (x3 - x0), y1: y0, x2: x3, y2: y3 + 0.6 * rise, x3, y3 };
  }
  if (sameColumn) {
    // Within a lane it swings out, so that it does not run over the components between its ends.
    const out = port > 0 || (port === null && source.lane === 1) ? 1 : -1;
    const swing = out * (10 + Math.min(source.swing ?? 20, 0.16 * rise));
    const [x0, y0] = [source.x + (out * source.w) / 2, source.y];
    const outer = out > 0 ? Math.max(x0, x3) : Math.min(x0, x3);
    return { x0, y0, x1: x0 + swing, y1: y0 - 0.3 * rise, x2: outer + swing, y2: y3 + 0.5 * rise, x3, y3 };
  }
  const [x0, y0] = [source.x, source.y - source.h / 2];
  const bend = Math.max(14, 0.48 * (y0 - y3));
  return { x0, y0, x1: x0, y1: y0 - bend, x2: x3, y2: y3 + bend, x3, y3 };
}

/** How far right a curve reaches, with room for a number on it. */
function rightmost(c) {
  return Math.max(c.x0, c.x3, pointOn(c, 0.3)[0], pointOn(c, 0.5)[0] + 12, pointOn(c, 0.7)[0]) + 6;
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
