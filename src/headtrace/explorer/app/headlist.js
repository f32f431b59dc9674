// Heads that matter: those with most flow, each with its picture, where it attends, and what it raises and lowers.

import { el } from "../page/dom.js";
import { number, percent, shorten, signed, tokenLabel } from "../page/text.js";
import { tableOf, themeColours } from "./colours.js";
import { button, quotedStars, select } from "./pieces.js";

const SIDE = 44; // pixels of a picture

export const SORTS = {
  flow: { label: "flow", of: (row) => Math.abs(row.flow) },
  attention: { label: "attention", of: (row) => row.attention },
  entropy: { label: "spread (entropy)", of: (_, head) => head.entropy },
  sink: { label: "attention to the first token", of: (_, head) => head.sink },
};

export function createHeadList(app) {
  const sort = select("by", Object.entries(SORTS).map(([name, { label }]) => [name, label]), "flow", (value) => app.go({ sort: value === "flow" ? undefined : value }, { replace: true }));
  const list = el("ol", { class: "head-list" });
  const note = el("p", { class: "hint" });
  const all = el("a", { class: "all-heads", href: "#" }, "all heads");
  const place = el("section", { class: "heads-that-matter", "aria-label": "Heads that matter" }, el("div", { class: "panel-head" }, el("h2", {}, "Heads that matter"), sort.group, all), note, list);
  let given = null;

  function update(state) {
    sort.field.value = state.sort ?? "flow";
    const [layers, heads] = [app.server.models[state.model].n_layers, app.server.models[state.model].n_heads];
    all.textContent = `all ${layers * heads} heads`;
    all.href = app.link({ view: "heads", head: undefined, cell: undefined });
    if (given) draw();
  }

  /** Show rows: `found` is what the server says of the mechanism, as far as it is there. */
  function show(found, recording) {
    given = { found, recording };
    draw();
  }

  function draw() {
    const { found, recording } = given;
    const carried = found.stage === "run" ? `Contribution to the ${found.measure} in this run; the flow is being computed.` : `Flow of the ${found.measure}, compared with changed prompts.`;
    note.textContent = found.wrong ? `${carried} Raises, lowers: the part of it that goes straight into the two logits.` : carried;
    const heads = new Map(recording.heads.map((head) => [`${head.layer} ${head.head}`, head]));
    const by = SORTS[app.state.sort ?? "flow"].of;
    const value = (row) => by(row, heads.get(`${row.layer} ${row.head}`));
    const most = Math.max(...found.heads.map((row) => Math.abs(row.flow)), 1e-9);
    const rows = [...found.heads].sort((a, b) => value(b) - value(a));
    const table = tableOf(themeColours());
    list.replaceChildren(...rows.map((row) => el("li", {}, headRow(row, recording, heads.get(`${row.layer} ${row.head}`), most, table, found))));
  }

  function headRow(row, { tokens }, head, most, table, found) {
    const { layer, head: index, dest, src } = row;
    const chosen = app.state.head?.[0] === layer && app.state.head?.[1] === index && app.state.cell?.[0] === dest && app.state.cell?.[1] === src;
    const token = (position) => el("bdi", { class: "token" }, shorten(tokenLabel(tokens[position]), 14));
    const other = { entropy: ` · ${number(head.entropy)} bits`, sink: ` · first token ${percent(head.sink)}` }[app.state.sort] ?? "";
    const bar = el("span", { class: `flow-bar${row.flow < 0 ? " against" : ""}`, "aria-hidden": "true" }, el("span", {}));
    bar.firstChild.style.width = `${(100 * Math.abs(row.flow)) / most}%`;
    return button(
      [
        thumbnail(row, tokens.length, table),
        el(
          "span",
          { class: "head-words" },
          el("span", { class: "head-line" }, el("b", {}, `L${layer}H${index}`), row.step ? el("span", { class: "step-number", title: `step ${row.step}` }, String(row.step)) : null, ...row.measured.map((role) => el("span", { class: "measured-role", title: `Over the corpus of the atlas: ${number(role.score)}, by chance ${number(role.chance)}` }, role.name)), el("span", { class: "role" }, quotedStars(row.role))),
          el("span", { class: "head-line" }, token(dest), " → ", token(src), ` ${row.attention.toFixed(2)}${elsewhere(row)}${other}`, el("span", { class: "does" }, ...does(row, found))),
        ),
        el("span", { class: "flow" }, signed(row.flow), bar),
      ],
      () => app.go({ head: [layer, index], cell: [dest, src] }),
      { class: "head-row", "aria-pressed": String(chosen), "data-step": row.step ?? null, title: "Why does it attend there?" },
    );
  }

  return { place, update, show, clear: () => ((given = null), list.replaceChildren(), (note.textContent = "")), recoloured: () => given && draw() };
}

const APART = 0.1; // attention in changed prompts that differs by less says nothing
const SAID = 0.05; // of a flow: less than that into one answer's logit is not worth a word

/** Attention in changed prompts, where it is another. */
function elsewhere({ attention, other_attention: other }) {
  return other !== null && Math.abs(other - attention) >= APART ? ` (changed prompts ${other.toFixed(2)})` : "";
}

/** What a head does to the two answers: straight to their logits, or through later layers, which the list cannot split. */
function does({ flow, straight, logits }, { answer, wrong }) {
  if (straight === null) return [];
  const later = Math.abs(straight) < Math.abs(flow) / 2;
  if (later || !logits) return [el("span", { class: "hint" }, later ? "acts through later layers" : `straight to the answer ${straight > 0 ? "+" : "−"}${Math.abs(straight).toFixed(2)}`)];
  const both = [[answer, logits[0]], [wrong, logits[1]]].filter(([, added]) => Math.abs(added) >= SAID * Math.abs(flow)).sort(([, one], [, two]) => Math.abs(two) - Math.abs(one));
  return both.flatMap(([text, added], i) => [i ? ", " : "", el("span", { class: "hint" }, added < 0 ? "lowers " : "raises "), el("bdi", {}, shorten(tokenLabel(text), 14)), ` ${Math.abs(added).toFixed(2)}`]);
}

/** A head in few pixels, with a mark where it attends. */
function thumbnail({ thumbnail: data, dest, src }, tokens, table) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const side = Math.round(Math.sqrt(bytes.length));
  const image = new ImageData(side, side);
  const [pixels, colours] = [new Uint32Array(image.data.buffer), new Uint32Array(table.buffer)];
  for (let row = 0; row < side; row++) for (let column = 0; column <= row; column++) pixels[row * side + column] = colours[bytes[row * side + column]];
  const small = document.createElement("canvas");
  [small.width, small.height] = [side, side];
  small.getContext("2d").putImageData(image, 0, 0);
  const scale = Math.min(2, devicePixelRatio || 1);
  const canvas = el("canvas", { class: "thumbnail", width: SIDE * scale, height: SIDE * scale, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, SIDE * scale, SIDE * scale);
  const size = Math.max(3, SIDE / tokens) * scale;
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--key");
  context.lineWidth = 1.5 * scale;
  context.strokeRect((src / tokens) * SIDE * scale - 1, (dest / tokens) * SIDE * scale - 1, size + 2, size + 2);
  return canvas;
}
