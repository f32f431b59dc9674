// One head as a grid of tokens: who attends to whom, with the exact number of what is looked at.

import { el } from "../page/dom.js";
import { number, shorten, tokenExact, tokenLabel } from "../page/text.js";
import { css, shade, shadeChange, themeColours } from "./colours.js";

const [SMALLEST, LARGEST] = [4, 30];
const LEGIBLE = 11; // pixels of a row that can have a name
const LETTERS = 12;
const SLOPE = (58 * Math.PI) / 180;

/** A token grid in a host. `choose(dest, src)` when a cell is clicked. */
export function createZoom(host, { choose }) {
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "token grid", "aria-describedby": "readout" });
  const ring = el("div", { class: "ring cell", hidden: true });
  const chosenRing = el("div", { class: "ring cell chosen", hidden: true });
  const readout = el("p", { id: "readout", class: "readout", "aria-live": "polite" });
  host.append(readout, el("div", { class: "zoom-scroll" }, el("div", { class: "grid" }, canvas, chosenRing, ring)));
  const zoom = { canvas };
  let [given, place, cursor] = [null, null, null];

  /** Show { tokens, attention, before, difference, cell, label }: `before` is what it was without the changes. */
  zoom.show = (now) => {
    given = now;
    canvas.setAttribute("aria-label", now.label);
    cursor = now.cell ? [...now.cell] : null;
    draw();
    say(cursor);
  };

  function draw() {
    const { tokens } = given;
    const colours = themeColours();
    const longest = Math.min(LETTERS, Math.max(...tokens.map((token) => [...tokenLabel(token)].length)));
    const words = 12 + 6.4 * longest;
    const width = Math.max(200, host.clientWidth - 2);
    let size = (width - words) / tokens.length;
    const named = size >= LEGIBLE;
    if (!named) size = (width - 10) / tokens.length;
    size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(size)));
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
    mark(ring, document.activeElement === canvas ? cursor : null);
    mark(chosenRing, given.cell ?? null);
  }

  function drawCells(context, colours) {
    const { size, left, top } = place;
    const gap = size > 8 ? 1 : 0;
    given.attention.forEach((row, dest) => row.forEach((value, src) => {
      context.fillStyle = css(colourOf(colours, dest, src, value));
      context.fillRect(left + src * size, top + dest * size, size - gap, size - gap);
    }));
  }

  function colourOf(colours, dest, src, value) {
    return given.difference ? shadeChange(colours, value - given.before[dest][src]) : shade(colours, value);
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

  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    mark(ring, cell);
    say(cell ?? given?.cell);
  });
  canvas.addEventListener("pointerleave", () => {
    mark(ring, null);
    say(given?.cell);
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) choose(...(cursor = cell));
  });
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && move(0, 0));
  canvas.addEventListener("blur", () => mark(ring, null));

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
    mark(ring, cursor);
    ring.scrollIntoView({ block: "nearest", inline: "nearest" });
    say(cursor);
  }

  let width = 0;
  new ResizeObserver(() => {
    if (!given || !host.clientWidth || host.clientWidth === width) return;
    width = host.clientWidth;
    draw();
  }).observe(host);

  zoom.redraw = () => given && draw();
  zoom.focus = () => canvas.focus();
  return zoom;
}
