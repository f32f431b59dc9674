// One head as a grid of tokens: who attends to whom, with the exact number of what is looked at.

import { el } from "../page/dom.js";
import { number, shorten, tokenExact, tokenLabel } from "../page/text.js";
import { tableOf, themeColours } from "./colours.js";

const [SMALLEST, LARGEST] = [0.5, 56]; // pixels of a cell
const LEGIBLE = 11; // pixels of a row that can have a name
const LETTERS = 12;
const HIGH = 22; // pixels of a name at the chosen cell
const SLOPE = (58 * Math.PI) / 180;

/** A token grid in a host. `choose(dest, src)` when a cell is clicked. */
export function createZoom(host, { choose }) {
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "token grid", "aria-describedby": "readout" });
  const ring = el("div", { class: "ring cell", hidden: true });
  const chosenRing = el("div", { class: "ring cell chosen", hidden: true });
  const names = [0, 1].map(() => el("span", { class: "cell-name", "aria-hidden": "true" }));
  const readout = el("p", { id: "readout", class: "readout", "aria-live": "polite" });
  host.append(readout, el("div", { class: "zoom-scroll" }, el("div", { class: "grid" }, canvas, chosenRing, ring, ...names)));
  const zoom = { canvas };
  let [given, place] = [null, null];
  let [cursor, pointer] = [null, null]; // the keyboard's cell; where in the window the pointer is, while it is what was moved last

  /** Show { of, tokens, attention, before, difference, cell, label }: `before` is what it was without the changes. What is shown
   * anew of the same head (`of`) leaves the keyboard and the pointer where they are, unless another cell was chosen. */
  zoom.show = (now) => {
    const again = given?.of === now.of;
    if (!again || (now.cell && String(now.cell) !== String(given.cell))) cursor = now.cell ? [...now.cell] : null;
    given = now;
    canvas.setAttribute("aria-label", now.label);
    draw();
    attend();
  };

  function draw() {
    const { tokens } = given;
    const colours = themeColours();
    const high = Math.max(320, innerHeight - 190);
    const longest = Math.min(LETTERS, Math.max(...tokens.map((token) => [...tokenLabel(token)].length)));
    const words = 12 + 6.4 * longest;
    const width = Math.max(200, host.clientWidth - 2);
    let size = Math.max(Math.min(width, high) - words, 0) / tokens.length;
    if (size < LEGIBLE) size = Math.min(LEGIBLE, (width - words) / tokens.length);
    const named = size >= LEGIBLE;
    if (!named) size = Math.min(width - 10, Math.max(high, width / 2)) / tokens.length;
    size = Math.max(SMALLEST, Math.min(LARGEST, size >= 4 ? Math.floor(size) : size >= 1 ? Math.floor(4 * size) / 4 : size));
    const [left, top] = named ? [words, 10 + words * Math.sin(SLOPE)] : [8, 8];
    place = { size, left, top, named };
    const over = named ? words * Math.cos(SLOPE) * 0.6 : 0; // the last names lean out to the right
    const [w, h] = [left + tokens.length * size + Math.max(2, Math.min(over, width - left - tokens.length * size)), top + tokens.length * size + 2];
    const scale = Math.min(2, devicePixelRatio || 1);
    [canvas.width, canvas.height] = [Math.round(w * scale), Math.round(h * scale)];
    [canvas.style.width, canvas.style.height] = [`${w}px`, `${h}px`];
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, w, h);
    drawCells(context, colours);
    if (named) drawNames(context, colours);
    names.forEach((name) => (name.hidden = named || !given.cell));
    mark(chosenRing, given.cell ?? null);
  }

  /** All cells as one picture, a pixel each: a prompt of 500 tokens has a hundred thousand. */
  function drawCells(context, colours) {
    const { size, left, top } = place;
    const side = given.tokens.length;
    const table = new Uint32Array(tableOf(colours, given.difference).buffer);
    const image = new ImageData(side, side);
    const pixels = new Uint32Array(image.data.buffer);
    for (let dest = 0; dest < side; dest++) {
      const [row, before] = [given.attention[dest], given.before?.[dest]];
      for (let src = 0; src <= dest; src++) pixels[dest * side + src] = table[given.difference ? 255 + Math.round(255 * (row[src] - before[src])) : Math.round(255 * row[src])];
    }
    const small = document.createElement("canvas");
    [small.width, small.height] = [side, side];
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = size * Math.min(2, devicePixelRatio || 1) < 1; // no cell is left out
    context.drawImage(small, left, top, side * size, side * size);
    if (size <= 8) return;
    context.fillStyle = colours.ground;
    for (let line = 1; line < side; line++) {
      context.fillRect(left, top + line * size - 1, line * size, 1);
      context.fillRect(left + line * size - 1, top + (line - 1) * size, 1, (side - line + 1) * size);
    }
  }

  function drawNames(context, { ink }) {
    const { size, left, top } = place;
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = ink;
    given.tokens.forEach((token, i) => {
      const name = shorten(tokenLabel(token), LETTERS);
      context.textAlign = "right";
      context.fillText(name, left - 6, top + (i + 0.5) * size + 3.5);
      context.save();
      context.translate(left + (i + 0.5) * size + 3, top - 5);
      context.rotate(-SLOPE);
      context.textAlign = "left";
      context.fillText(name, 0, 0);
      context.restore();
    });
  }

  function mark(element, cell) {
    element.hidden = !cell;
    if (!cell) return;
    const { size, left, top } = place;
    const box = { left: left + cell[1] * size - 1.5, top: top + cell[0] * size - 1.5, width: size + 2, height: size + 2 };
    for (const [name, value] of Object.entries(box)) element.style[name] = `${value}px`;
    if (place.named) return;
    const last = given.tokens.length * size;
    const put = (label, position, x, y) => {
      label.textContent = shorten(tokenLabel(given.tokens[position]), LETTERS);
      Object.assign(label.style, { left: `${x}px`, top: `${y}px` });
    };
    const beside = Math.max(HIGH, Math.min(top + cell[0] * size - 8, top + last - HIGH)); // both within the drawing
    put(names[0], cell[0], left + Math.max(0, Math.min((cell[1] + 1) * size + 6, last - 90)), beside);
    put(names[1], cell[1], left + Math.max(0, Math.min(cell[1] * size, last - 90)), beside - HIGH);
  }

  function say(cell) {
    readout.replaceChildren(...(cell ? words(...cell) : ["Point at a cell for its number; click it to see why."]));
  }

  function words(dest, src) {
    const named = (position) => el("bdi", { class: "token" }, tokenExact(given.tokens[position]));
    const now = given.attention[dest][src];
    const before = given.before?.[dest][src];
    const value = before === undefined ? number(now) : `${number(before)} → ${number(now)} with your changes`;
    return [named(dest), ` at ${dest} attends to `, named(src), ` at ${src}: `, el("b", {}, value)];
  }

  function cellAt(event) {
    if (!given) return null;
    const box = canvas.getBoundingClientRect();
    const [src, dest] = [event.clientX - box.left - place.left, event.clientY - box.top - place.top].map((way) => Math.floor(way / place.size));
    return dest >= 0 && dest < given.tokens.length && src >= 0 && src <= dest ? [dest, src] : null;
  }

  /** Mark the cell that is looked at, by the pointer or else by the keyboard, and say its number, or else that of the chosen one. */
  function attend() {
    const cell = (pointer && cellAt(pointer)) ?? (document.activeElement === canvas ? cursor : null);
    mark(ring, cell);
    say(cell ?? given?.cell);
  }

  const pointed = (at) => {
    pointer = at;
    attend();
  };
  canvas.addEventListener("pointermove", pointed);
  canvas.addEventListener("pointerleave", () => pointed(null));
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) choose(...(cursor = cell));
  });
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && move(0, 0));
  canvas.addEventListener("blur", attend);

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in STEPS) move(...STEPS[event.key]);
    else if (event.key === "Enter" || event.key === " ") cursor && choose(...cursor);
    else return;
    event.preventDefault();
  });

  function move(down, right) {
    if (!given) return;
    const last = given.tokens.length - 1;
    const [dest, src] = cursor ?? [last, last];
    const row = Math.max(0, Math.min(last, dest + down));
    cursor = [row, Math.max(0, Math.min(row, src + right))];
    pointed(null); // the pointer may rest on another cell
    ring.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  const redraw = () => (draw(), attend());
  let width = 0;
  new ResizeObserver(() => {
    if (!given || !host.clientWidth || host.clientWidth === width) return;
    width = host.clientWidth;
    redraw();
  }).observe(host);

  zoom.redraw = () => given && redraw();
  zoom.focus = () => canvas.focus();
  return zoom;
}
