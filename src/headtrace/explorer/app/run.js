// A run of many prompts: the map of how alike their circuits are, families, search; a click opens circuits.

import { el } from "../page/dom.js";
import { indexCircuit } from "../page/graph.js";
import { createMechanism } from "../page/mechanism.js";
import { inert, number, plural, shorten, tokenExact } from "../page/text.js";
import { tableOf, themeColours } from "./colours.js";
import { FRESH } from "./prompt.js";
import { afterwards, button, notice, select } from "./pieces.js";
import { ask, latestOnly } from "./server.js";

const LIMIT = 50;
const COMPARED = 4; // families whose mechanisms are drawn side by side
const STRIP = 12;

/** What the view shows, in plain words. */
const HELP = [
  "A run is a folder of circuits of many prompts. Circuits that are alike are a family; on top is what the most typical circuit of each family does, from the words at the bottom to the answer at the top.",
  "The map shows how alike each two of them are: strong colours are pairs with much in common, and the blocks along the diagonal are families, coloured at the edge.",
  "Click a cell to open the two circuits it compares, or a cell of the diagonal to open one. The representative of a family is the circuit that is most like all others in it.",
];

export function createRun(app) {
  const said = notice();
  const about = el("p", { class: "kind" });
  const readout = el("p", { class: "readout", "aria-live": "polite" }, "Point at a cell: how alike two circuits are. Click it to see both.");
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "cluster map", "aria-label": "How alike circuits are. Arrow keys go from pair to pair, Enter opens both circuits." });
  const ring = el("div", { class: "ring cell", hidden: true });
  const scale = el("p", { class: "scale" }, "nothing in common", el("span", { class: "scale-bar" }), "alike");
  const mapHost = el("div", { class: "map-host" }, scale, readout, el("div", { class: "zoom-scroll" }, el("div", { class: "grid" }, canvas, ring)));
  const field = el("input", { type: "search", dir: "auto", placeholder: "Search prompts", "aria-label": "Search prompts", oninput: afterwards(300, () => app.go({ search: field.value || undefined }, { replace: true })) });
  const families = select("Family", [["", "all"]], "", (value) => app.go({ family: value === "" ? undefined : Number(value) }));
  const found = el("p", { class: "hint", role: "status" });
  const list = el("ul", { class: "run-list" });
  const more = button("More", () => load(app.state, list.children.length), { hidden: true });
  const familyList = el("ul", { class: "family-list" });
  const host = el("div", { class: "circuit-slot", hidden: true });
  const cards = el("div", { class: "family-cards" });
  const side = el("div", { class: "run-side" }, el("h2", {}, "Families"), familyList, el("h2", {}, "Prompts"), el("div", { class: "controls" }, field, families.group), found, list, more);
  const place = el("section", { class: "run", hidden: true }, about, said.place, cards, el("div", { class: "run-body" }, mapHost, side), host);

  /** Colours of families, as in the figures. */
  const familyColour = (family) => map?.families.find((each) => each.family === family)?.colour ?? "";
  let [map, prompts, shown, size, cursor, listed] = [null, new Map(), null, 4, null, null];
  const [mapping, listing, opening] = [latestOnly(), latestOnly(), latestOnly()];

  function update(state) {
    field.value = document.activeElement === field ? field.value : (state.search ?? "");
    families.field.value = state.family === undefined ? "" : String(state.family);
    if (!map) mapping(loadMap, said.failed);
    else if (place.checkVisibility()) draw();
    const wanted = JSON.stringify([state.search, state.family]);
    if (wanted !== listed) load(state, 0);
    open(state.open);
  }

  async function loadMap(signal) {
    said.busy("Comparing the circuits of the run: the first time this may take a minute…");
    map = await ask("/api/run/map", { signal });
    said.clear();
    about.textContent = `${inert(map.name)}: ${plural(map.size, "circuit")}${map.ids.length < map.size ? `, ${map.ids.length} of them on the map` : ""}, compared by ${inert(map.grain)}.`;
    families.field.replaceChildren(el("option", { value: "" }, "all"), ...map.families.map(({ family, size: many }) => el("option", { value: family }, `${family} (${many})`)));
    families.field.value = app.state.family ?? "";
    familyList.replaceChildren(...map.families.map(familyRow));
    for (const item of list.children) item.querySelector(".family-swatch").style.background = familyColour(prompts.get(item.dataset.id)?.family);
    draw();
    app.shareable();
    for (const family of map.families.slice(0, COMPARED)) cards.append(await familyCard(family, signal));
  }

  /** What the representative of a family does: families side by side. */
  async function familyCard({ family, size: many, representative }, signal) {
    const { circuit, mechanism } = await ask(`/api/run/circuits/${encodeURIComponent(representative)}`, { signal });
    const swatch = el("span", { class: "family-swatch" });
    swatch.style.background = familyColour(family);
    const drawn = mechanism ? createMechanism(mechanism) : el("p", { class: "hint" }, "Nothing of its circuit can be named as a step.");
    return el("section", { class: "family-card", "aria-label": `Family ${family}` }, el("h2", {}, swatch, `Family ${family}, ${plural(many, "circuit")}`), el("p", { class: "hint" }, el("bdi", {}, shorten(inert(circuit.title), 120))), drawn);
  }

  function familyRow({ family, size: many, representative, words }) {
    const swatch = el("span", { class: "family-swatch" });
    swatch.style.background = familyColour(family);
    const show = button([swatch, `Family ${family}, ${plural(many, "circuit")}`], () => app.go({ open: [representative], look: undefined }), { class: "row", title: "Open its representative" });
    return el("li", {}, show, words ? el("p", { class: "hint" }, el("bdi", {}, inert(words))) : null);
  }

  function load(state, offset) {
    listed = JSON.stringify([state.search, state.family]);
    list.classList.toggle("stale", !offset); // until those that are looked for are there
    listing(async (signal) => {
      const query = new URLSearchParams({ search: state.search ?? "", offset, limit: LIMIT });
      if (state.family !== undefined) query.set("family", state.family);
      const page = await ask(`/api/run/prompts?${query}`, { signal });
      for (const prompt of page.prompts) prompts.set(prompt.id, prompt);
      found.textContent = `${plural(page.found, "prompt")} found`;
      const rows = page.prompts.map(promptRow);
      list.classList.remove("stale");
      list.replaceChildren(...(offset ? list.children : []), ...rows);
      more.hidden = list.children.length >= page.found;
    }, said.failed);
  }

  function promptRow({ id, text, answer, wrong, family, representative }) {
    const swatch = el("span", { class: "family-swatch" });
    if (family !== null) swatch.style.background = familyColour(family);
    const note = `${representative ? "★ represents its family, " : ""}answer ${answer === null ? "unknown" : tokenExact(answer)}`;
    const show = button([swatch, el("bdi", {}, shorten(inert(text), 200)), el("span", { class: "hint" }, ` ${note}`)], () => app.go({ open: [id], look: undefined }), { class: "row" });
    const look = button("heads", () => app.go({ ...FRESH, view: "heads", text, answer: answer ?? undefined, wrong: wrong ?? undefined }), { class: "link", title: "Its attention, head by head" });
    return el("li", { "data-id": id }, show, look);
  }

  function draw() {
    const count = map.ids.length;
    const width = Math.max(200, mapHost.clientWidth - 2);
    size = Math.max(2, Math.min(18, Math.floor((width - STRIP) / Math.max(1, count))));
    const side = STRIP + count * size;
    const scale = Math.min(2, devicePixelRatio || 1);
    [canvas.width, canvas.height] = [side * scale, side * scale];
    [canvas.style.width, canvas.style.height] = [`${side}px`, `${side}px`];
    const context = canvas.getContext("2d");
    const colours = themeColours();
    context.setTransform(scale, 0, 0, scale, 0, 0);
    // All cells as one picture, a pixel each: a map of 300 circuits has ninety thousand.
    const table = new Uint32Array(tableOf(colours).buffer);
    const image = new ImageData(count, count);
    const pixels = new Uint32Array(image.data.buffer);
    map.distances.forEach((row, i) => row.forEach((distance, j) => (pixels[i * count + j] = table[Math.round(255 * (1 - Math.max(0, Math.min(1, distance))))])));
    const small = document.createElement("canvas");
    [small.width, small.height] = [count, count];
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, STRIP, STRIP, count * size, count * size);
    map.family.forEach((family, i) => {
      context.fillStyle = familyColour(family);
      context.fillRect(STRIP + i * size, 0, size, STRIP - 3);
      context.fillRect(0, STRIP + i * size, STRIP - 3, size);
    });
    if (cursor) mark(cursor);
  }

  function mark(cell) {
    ring.hidden = !cell;
    if (!cell) return;
    const box = { left: STRIP + cell[1] * size - 2, top: STRIP + cell[0] * size - 2, width: size + 4, height: size + 4 };
    for (const [name, value] of Object.entries(box)) ring.style[name] = `${value}px`;
  }

  function say([i, j]) {
    const name = (index) => {
      const prompt = prompts.get(map.ids[index]);
      return el("bdi", {}, prompt ? `“${shorten(inert(prompt.text), 90)}”` : inert(map.ids[index]));
    };
    const both = i === j ? [name(i)] : [name(i), " and ", name(j)];
    readout.replaceChildren(...both, `: family ${map.family[i]}${i === j ? "" : ` and ${map.family[j]}, distance ${number(map.distances[i][j])}`}`);
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const [j, i] = [event.clientX - box.left, event.clientY - box.top].map((way) => Math.floor((way - STRIP) / size));
    return i >= 0 && j >= 0 && i < map.ids.length && j < map.ids.length ? [i, j] : null;
  }

  const choose = ([i, j]) => app.go({ open: i === j ? [map.ids[i]] : [map.ids[i], map.ids[j]], look: undefined });

  canvas.addEventListener("pointermove", (event) => {
    const cell = map && cellAt(event);
    mark(cell);
    if (cell) say(cell);
  });
  canvas.addEventListener("pointerleave", () => mark(null));
  canvas.addEventListener("click", (event) => {
    const cell = map && cellAt(event);
    if (cell) choose((cursor = cell));
  });
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && map && move(0, 0));
  canvas.addEventListener("blur", () => mark(null));
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  canvas.addEventListener("keydown", (event) => {
    if (!map || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in STEPS) move(...STEPS[event.key]);
    else if (event.key === "Enter" || event.key === " ") cursor && choose(cursor);
    else return;
    event.preventDefault();
  });

  function move(down, right) {
    const within = (value) => Math.max(0, Math.min(map.ids.length - 1, value));
    cursor = cursor ? [within(cursor[0] + down), within(cursor[1] + right)] : [0, 0];
    mark(cursor);
    ring.scrollIntoView({ block: "nearest", inline: "nearest" });
    say(cursor);
  }

  /** Open one circuit of the run, or two side by side. */
  function open(ids) {
    const wanted = ids.slice(0, 2);
    const key = wanted.join("|");
    host.hidden = !wanted.length || shown?.key !== key || !shown.views;
    if (!wanted.length) return (shown = null);
    if (shown?.key === key) return shown.views && app.showCircuits(host, shown.views.map(({ graph }) => graph));
    shown = { key, views: null };
    opening(async (signal) => {
      said.busy("Opening…");
      const views = await Promise.all(wanted.map((id) => ask(`/api/run/circuits/${encodeURIComponent(id)}`, { signal })));
      said.clear();
      shown = { key, views: views.map(({ circuit, python }) => ({ graph: indexCircuit(circuit), python })) };
      host.hidden = false;
      app.showCircuits(host, shown.views.map(({ graph }) => graph));
      host.scrollIntoView({ block: "start", behavior: "smooth" });
      app.shareable();
    }, (error) => {
      shown = null;
      host.hidden = true;
      said.failed(error);
    });
  }

  let width = 0;
  new ResizeObserver(() => {
    if (!map || !mapHost.clientWidth || mapHost.clientWidth === width) return;
    width = mapHost.clientWidth;
    draw();
  }).observe(mapHost);

  return {
    title: "Run",
    help: HELP,
    place,
    update,
    recoloured: () => map && draw(),
    python: () => shown?.views?.map(({ python }) => python).join("\n\n"),
    json: () => shown?.views?.map(({ graph }) => graph.data) ?? map,
    canvas: () => canvas,
    name: () => "run",
  };
}
