// All heads of the model on a prompt, and one of them close up.

import { el } from "../page/dom.js";
import { number, plural, tokenExact } from "../page/text.js";
import { createGrid } from "./grid.js";
import { promptOf } from "./library.js";
import { button, choice, notice, select } from "./pieces.js";
import { latestOnly } from "./server.js";
import { createWhy } from "./why.js";
import { createZoom } from "./zoom.js";

/** What heads can be ordered and chosen by, in words. */
export const WORDS = {
  strongest: { label: "strongest attention", of: (head) => head.strongest[2], said: "attends most" },
  sink: { label: "attention to the first token", of: (head) => head.sink, said: "to the first token" },
  previous: { label: "attention to the token before", of: (head) => head.previous, said: "to the token before" },
  entropy: { label: "spread (entropy in bits)", of: (head) => head.entropy, said: "spread", unit: " bits" },
};

/** What the view shows, in plain words. */
const HELP = [
  "A language model reads your prompt token by token (a token is a word or a piece of one). In each layer, several attention heads look back: at every token, a head decides from which earlier tokens it takes something along. How much it takes from each are its attention weights; they add up to 1.",
  "Each small square is one head: rows are the tokens that look, columns the tokens they look at, and the stronger the colour of a cell, the more attention (the scale is above the grid). A strong left edge is a head that mostly looks at the first token, which is its way of doing nothing (a sink). A strong line just below the diagonal looks at the token before.",
  "Click a square to see that head with its tokens, then a cell to ask why: which few channels of the head matched the two tokens, which components had written what they matched, and what the head carried over. ×0, ×½ and ×2 take such a thing away, halve or double it, in the running model.",
];

export function createHeads(app) {
  const [said, saidOfHead] = [notice(), notice()];
  const count = el("output", { class: "hint" });
  const order = select("Order", [["place", "by layer and head"], ["most", "highest first"], ["least", "lowest first"]], "place", (value) => app.go({ order: value }, { replace: true }));
  const by = select("Measure", Object.entries(WORDS).map(([name, { label }]) => [name, label]), "strongest", (value) => app.go({ by: value, least: undefined, most: undefined }, { replace: true }));
  const [least, most] = ["least", "most"].map((name) => el("input", { type: "number", step: "any", min: 0, "aria-label": `at ${name}`, onchange: (event) => app.go({ [name]: event.target.value === "" ? undefined : Number(event.target.value) }, { replace: true }) }));
  const first = el("input", { type: "checkbox", onchange: () => app.go({ first: first.checked ? "out" : undefined }, { replace: true }) });
  const show = choice("show", "Attention that is shown", [["", "clean"], ["changed", "changed"], ["difference", "difference"]], "", (value) => app.go({ show: value || undefined }, { replace: true }));
  const scale = el("span", { class: "scale" });
  const bounds = el("span", { class: "group" }, "from", least, "to", most);
  const controls = el(
    "div",
    { class: "controls", role: "group", "aria-label": "Order and filter of heads" },
    order.group,
    by.group,
    bounds,
    el("label", { class: "group" }, first, "leave out the first token"),
    show.group,
    count,
    scale,
  );
  const gridHost = el("div", { class: "grid-host" });
  const grid = createGrid(gridHost, { choose: (layer, head) => app.go({ head: [layer, head], cell: undefined }), look });
  const title = el("h2", {});
  const measures = el("p", { class: "kind" });
  const zoomHost = el("div", { class: "zoom-host" });
  const zoom = createZoom(zoomHost, { choose: (dest, src) => app.go({ head: drawn, cell: [dest, src] }) });
  const close = button("✕", () => app.go({ head: undefined, cell: undefined }), { class: "quiet", "aria-label": "Close this head" });
  const zoomPanel = el("section", { class: "zoom-panel", "aria-label": "One head", hidden: true }, el("div", { class: "panel-head" }, title, close), measures, zoomHost);
  const why = createWhy(app);
  const changesSlot = el("div", { class: "changes-slot" });
  const body = el("div", { class: "heads-body" }, gridHost, zoomPanel, el("div", { class: "why-column" }, changesSlot, why.place));
  const place = el("section", { class: "heads", hidden: true }, controls, said.place, saidOfHead.place, body);

  let shown = null; // the recording and patterns on the screen
  let [closeUpKey, drawn] = [null, null]; // what the close-up answers, and its head

  /** What the cells on the screen depend on. */
  const keyOf = (state) => JSON.stringify([promptOf(state), state.changes.length && state.show ? [state.changes, state.show] : null]);

  function look(cell, box) {
    app.card(cell && card(cell), box);
  }

  function card({ layer, head }) {
    const found = shown.recording.heads.find((candidate) => candidate.layer === layer && candidate.head === head);
    const [dest, src] = found.strongest;
    const fact = (term, value) => [el("dt", {}, term), el("dd", {}, value)];
    return [
      el("h3", {}, `L${layer}H${head}`),
      el(
        "dl",
        { class: "facts" },
        fact("attends most", `${number(found.strongest[2])}, ${tokenExact(shown.recording.tokens[dest])} ${dest} → ${tokenExact(shown.recording.tokens[src])} ${src}`),
        fact("to the first token", number(found.sink)),
        fact("to the token before", number(found.previous)),
        fact("spread", `${number(found.entropy)} bits`),
      ),
    ];
  }

  const loading = latestOnly();
  const closeUp = latestOnly();

  function update(state) {
    order.field.value = state.order;
    by.field.value = state.by;
    [least.value, most.value] = [state.least ?? "", state.most ?? ""];
    first.checked = state.first === "out";
    show.group.hidden = !state.changes.length;
    show.set(state.show ?? "");
    const changing = state.show === "difference" && state.changes.length > 0;
    const ends = changing ? ["less", "more", "than before"] : ["0", "1", "attention"];
    scale.replaceChildren(ends[0], el("span", { class: changing ? "scale-bar changing" : "scale-bar" }), ends[1], el("span", { class: "hint" }, ends[2]));
    place.classList.toggle("zoomed", Boolean(state.head));
    controls.hidden = !state.text;
    if (!state.text) {
      said.clear();
      gridHost.hidden = true;
      zoomPanel.hidden = why.place.hidden = true;
      return;
    }
    if (shown?.key !== keyOf(state)) count.textContent = ""; // it was of what is still on the screen
    loading(async (signal) => {
      const recording = await app.recording(signal);
      if (shown?.recording.id !== recording.id) said.busy("Reading the attention of every head…");
      const patterns = await app.library.patterns(recording, signal);
      const changed = state.changes.length && state.show ? await changedPatterns(signal) : null;
      said.clear();
      gridHost.hidden = false;
      shown = { recording, patterns, changed, key: keyOf(state) };
      app.fade();
      await showGrid(state);
    }, (error) => {
      gridHost.hidden = true;
      app.fade();
      said.failed(error);
    });
    closeUp((signal) => showHead(state, signal), (error) => {
      zoomPanel.hidden = true;
      closeUpKey = null;
      saidOfHead.failed(error);
    });
    why.update(state);
  }

  async function changedPatterns(signal) {
    const { changed } = await app.changed(signal);
    return app.library.patterns(changed, signal);
  }

  function showGrid(state) {
    const { recording, patterns, changed } = shown;
    const value = WORDS[state.by].of;
    const passes = (head) => value(head) >= (state.least ?? -Infinity) && value(head) <= (state.most ?? Infinity);
    const marked = recording.heads.map((head) => ({ ...head, passes: passes(head) }));
    const inPlace = state.order === "place";
    const sign = state.order === "least" ? 1 : -1;
    const sorted = inPlace ? marked : marked.filter((head) => head.passes).sort((a, b) => sign * (value(a) - value(b)));
    const passing = marked.filter((head) => head.passes).length;
    const mattering = app.mattering(recording);
    count.textContent = `${passing === marked.length ? "all" : `${passing} of`} ${plural(marked.length, "head")}${mattering.size ? `, ${mattering.size} that matter are ringed` : ""}`;
    return grid.show({
      patterns,
      changed,
      difference: state.show === "difference" && changed !== null,
      heads: sorted.map((head) => ({ ...head, matters: mattering.size ? mattering.has(`${head.layer} ${head.head}`) : null })),
      shape: inPlace ? [Math.round(recording.heads.length / patterns.heads), patterns.heads] : null,
      chosen: state.head,
      withoutFirst: state.first === "out",
      label: `Attention of ${plural(sorted.length, "head")}, one small square each. Arrow keys go from head to head, Enter opens one.`,
    });
  }

  async function showHead(state, signal) {
    zoomPanel.hidden = !state.head;
    saidOfHead.clear();
    if (!state.head) return;
    const [layer, head] = state.head;
    const key = JSON.stringify([keyOf(state), state.head]);
    zoomPanel.classList.toggle("stale", closeUpKey !== key); // until its cells are there, the name is that of the cells that are
    const recording = await app.recording(signal);
    const found = recording.heads.find((candidate) => candidate.layer === layer && candidate.head === head);
    if (!found) throw new Error(`This model has no head L${layer}H${head}. Choose one of the grid.`);
    const clean = await app.library.head(recording, layer, head, signal);
    const changing = state.changes.length > 0 && state.show;
    const changed = changing ? await changedHead(layer, head, signal) : null;
    zoomPanel.classList.remove("stale");
    [closeUpKey, drawn] = [key, state.head];
    title.textContent = `L${layer}H${head}`;
    measures.textContent = Object.values(WORDS).map(({ said, of, unit = "" }) => `${said} ${number(of(found))}${unit}`).join(" · ");
    zoom.show({
      of: JSON.stringify([recording.id, state.head]),
      tokens: recording.tokens,
      attention: (changed ?? clean).attention,
      before: changed ? clean.attention : null,
      difference: state.show === "difference" && changed !== null,
      cell: state.cell && state.cell[0] < recording.tokens.length && state.cell[1] <= state.cell[0] ? state.cell : null,
      label: `Attention of head L${layer}H${head}: rows attend to columns. Arrow keys go from cell to cell, Enter asks why.`,
    });
  }

  async function changedHead(layer, head, signal) {
    const { changed } = await app.changed(signal);
    return app.library.head(changed, layer, head, signal);
  }

  function recoloured() {
    grid.redraw();
    zoom.redraw();
  }

  return {
    title: "Heads",
    help: HELP,
    place,
    changesSlot,
    update,
    recoloured,
    grid,
    python: () => why.python() ?? shown?.recording.python,
    json: () => why.data() ?? shown?.recording,
    results: [body],
    outdated: () => shown !== null && !gridHost.hidden && shown.key !== keyOf(app.state),
    canvas: (state) => (state.head ? zoom.canvas : grid.canvas),
    name: (state) => (state.head ? `head-L${state.head[0]}H${state.head[1]}` : "heads"),
  };
}
