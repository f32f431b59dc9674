// Every head's attention as small multiples on one canvas, drawn in slices so that the page never stops answering.

import { el } from "../page/dom.js";
import { tableOf, themeColours } from "./colours.js";
import { picture } from "./patterns.js";

const SLICE = 10; // milliseconds of drawing at a time
const GAP = 4;
const [LEFT, TOP] = [34, 20]; // room for the names of layers and heads
const NAME = 14; // above each head, where they are not in their layer's row
const [SMALLEST, LARGEST, FEW] = [26, 92, 150]; // pixels of a head; where there are only a few of them
const MANY = 64;

/**
 * A grid in a host. `choose(layer, head)` when a head is clicked, `look(head, box)` when the pointer or the keyboard is on
 * one, with its box of the window (null: on none).
 */
export function createGrid(host, { choose, look }) {
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "grid of heads" });
  const ring = el("div", { class: "ring", hidden: true });
  const chosenRing = el("div", { class: "ring chosen", hidden: true });
  const frame = el("div", { class: "grid" }, canvas, chosenRing, ring);
  host.append(frame);
  const grid = { canvas, cells: [], drawn: Promise.resolve(), longest: 0 };
  let [given, cursor, drawing, size] = [null, null, null, 0];
  let pointing = false; // whether the pointer was moved after the keyboard

  /** Show heads: { patterns, changed, difference, heads: [{layer, head, passes, matters}], shape, chosen, withoutFirst, label }; shape
   * is [layers, heads], or null where heads are not in their places. */
  grid.show = (now) => {
    given = now;
    canvas.setAttribute("aria-label", now.label);
    place();
    grid.drawn = draw();
    return grid.drawn;
  };

  function place() {
    const width = Math.max(240, host.clientWidth);
    const inRows = given.shape !== null;
    const [layers, heads] = given.shape ?? [];
    // A deep model with few heads lies on its side where there is room: all of it is then seen at once.
    const across = inRows && layers > heads && width >= LEFT + layers * (SMALLEST + GAP);
    const columns = !inRows ? Math.max(1, Math.floor(width / (58 + GAP))) : across ? layers : heads;
    const left = inRows ? LEFT : 0;
    const fits = (width - left) / columns - GAP;
    size = Math.floor(Math.max(SMALLEST, Math.min(given.heads.length > MANY ? LARGEST : FEW, fits)));
    const [stepX, stepY] = [size + GAP, size + GAP + (inRows ? 0 : NAME)];
    grid.cells = given.heads.map((head, i) => {
      const [row, column] = !inRows ? [Math.floor(i / columns), i % columns] : across ? [head.head, head.layer] : [head.layer, head.head];
      return { ...head, row, column, x: left + column * stepX, y: TOP + row * stepY + (inRows ? 0 : NAME - TOP) };
    });
    const rows = 1 + Math.max(-1, ...grid.cells.map((cell) => cell.row));
    const [w, h] = [left + columns * stepX, (inRows ? TOP : 0) + rows * stepY + 2];
    const scale = Math.min(2, devicePixelRatio || 1);
    [canvas.width, canvas.height] = [Math.round(w * scale), Math.max(1, Math.round(h * scale))];
    [canvas.style.width, canvas.style.height] = [`${w}px`, `${h}px`];
    Object.assign(grid, { scale, columns, inRows, across });
    if (cursor) cursor = grid.cells.find((cell) => cell.layer === cursor.layer && cell.head === cursor.head) ?? null;
    mark(ring, cursor && document.activeElement === canvas ? cursor : null);
    const chosen = given.chosen && grid.cells.find(({ layer, head }) => layer === given.chosen[0] && head === given.chosen[1]);
    mark(chosenRing, chosen);
    if (chosen) bringIntoView(chosen);
  }

  /** Scroll the host, and nothing around it, to a head that is out of sight. */
  function bringIntoView({ y }) {
    if (y < host.scrollTop || y + size > host.scrollTop + host.clientHeight) host.scrollTop = y - host.clientHeight / 2;
  }

  function mark(element, cell) {
    element.hidden = !cell;
    if (!cell) return;
    Object.assign(element.style, { left: `${cell.x - 2}px`, top: `${cell.y - 2}px`, width: `${size + 4}px`, height: `${size + 4}px` });
  }

  function draw() {
    if (drawing) drawing.cancelled = true;
    const own = (drawing = { cancelled: false });
    const context = canvas.getContext("2d");
    const colours = themeColours();
    const table = tableOf(colours, given.difference);
    const scratch = document.createElement("canvas").getContext("2d");
    context.setTransform(grid.scale, 0, 0, grid.scale, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = false;
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    if (grid.inRows) nameRows(context, colours);
    let next = 0;
    return new Promise((resolve) => {
      const slice = () => {
        if (own.cancelled) return resolve(false);
        const began = performance.now();
        while (next < grid.cells.length && performance.now() - began < SLICE) drawCell(context, scratch, grid.cells[next++], table, colours);
        grid.longest = Math.max(grid.longest, performance.now() - began);
        if (next < grid.cells.length) setTimeout(slice);
        else resolve(true);
      };
      slice();
    });
  }

  function nameRows(context, { muted }) {
    context.fillStyle = muted;
    context.textAlign = "right";
    for (const row of new Set(grid.cells.map((cell) => cell.row))) context.fillText(`${grid.across ? "H" : "L"}${row}`, LEFT - 7, TOP + row * (size + GAP) + size / 2 + 4);
    context.textAlign = "center";
    for (let column = 0; column < grid.columns; column++) context.fillText(`${grid.across ? "L" : "H"}${column}`, LEFT + column * (size + GAP) + size / 2, TOP - 7);
  }

  function drawCell(context, scratch, cell, table, colours) {
    const { patterns, changed, difference, withoutFirst } = given;
    const start = patterns.start(cell.layer, cell.head);
    const values = difference ? (i) => 255 + changed.bytes[i] - patterns.bytes[i] : (i) => (changed ?? patterns).bytes[i];
    const image = picture(patterns, start, Math.round(size * grid.scale), values, table, withoutFirst);
    [scratch.canvas.width, scratch.canvas.height] = [image.width, image.height];
    scratch.putImageData(image, 0, 0);
    context.fillStyle = colours.surface;
    context.fillRect(cell.x, cell.y, size, size);
    context.globalAlpha = !cell.passes ? 0.12 : cell.matters === false ? 0.3 : 1;
    context.drawImage(scratch.canvas, cell.x, cell.y, size, size);
    context.globalAlpha = 1;
    context.strokeStyle = cell.matters ? colours.ink : colours.line;
    context.lineWidth = cell.matters ? 2 : 1;
    context.strokeRect(cell.x - 0.5, cell.y - 0.5, size + 1, size + 1);
    if (grid.inRows) return;
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.fillText(`L${cell.layer}H${cell.head}`, cell.x, cell.y - 4);
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return grid.cells.find((cell) => x >= cell.x && x < cell.x + size && y >= cell.y && y < cell.y + size) ?? null;
  }

  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    pointing = true;
    mark(ring, cell);
    point(cell);
  });
  canvas.addEventListener("pointerleave", () => {
    if (!pointing) return; // the keyboard scrolled the grid away from a pointer at rest
    pointing = false;
    mark(ring, null);
    look(null);
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (!cell) return;
    cursor = cell;
    choose(cell.layer, cell.head);
  });
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && step(0, 0));
  canvas.addEventListener("blur", () => {
    mark(ring, null);
    look(null);
  });

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in STEPS) step(...STEPS[event.key]);
    else if (event.key === "Home") step(-Infinity, -Infinity);
    else if (event.key === "End") step(Infinity, Infinity);
    else if ((event.key === "Enter" || event.key === " ") && cursor) choose(cursor.layer, cursor.head);
    else return;
    event.preventDefault();
  });

  /** Move the keyboard's place by rows and columns, within the grid. */
  function step(down, right) {
    if (!grid.cells.length) return;
    pointing = false;
    const byChosen = ({ layer, head }) => given.chosen && layer === given.chosen[0] && head === given.chosen[1];
    const from = cursor ?? grid.cells.find(byChosen) ?? grid.cells[0];
    if (Number.isFinite(down)) {
      const wanted = grid.cells.find((cell) => cell.row === from.row + down && cell.column === from.column + right);
      cursor = wanted ?? from;
    } else cursor = down < 0 ? grid.cells[0] : grid.cells[grid.cells.length - 1];
    mark(ring, cursor);
    ring.scrollIntoView({ block: "nearest", inline: "nearest" });
    point(cursor);
  }

  /** Say what a head does, beside it: never over it. */
  function point(cell) {
    const box = canvas.getBoundingClientRect();
    if (cell) look(cell, new DOMRect(box.left + cell.x, box.top + cell.y, size, size));
    else look(null);
  }

  let width = 0;
  new ResizeObserver(() => {
    if (!given || !host.clientWidth || host.clientWidth === width) return;
    width = host.clientWidth;
    place();
    grid.drawn = draw();
  }).observe(host);

  grid.redraw = () => given && (grid.drawn = draw());
  return grid;
}
