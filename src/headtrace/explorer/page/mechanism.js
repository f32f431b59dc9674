// The mechanism of a circuit: a sentence with numbered chips, the drawing, the ledger, and the card that is chosen.

import { commandButtons } from "./details.js";
import { el } from "./dom.js";
import { download, downloadPng } from "./export.js";
import { inert } from "./text.js";

const number = (value) => `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(2)}`;

/** The mechanism's view; `lit` is a step that is chosen already. */
export function createMechanism(data, lit = null) {
  const steps = new Map(data.steps.filter((step) => !step.hidden).map((step) => [step.id, step]));
  const details = el("section", { class: "step-details", "aria-live": "polite" });
  const figure = el("div", { class: "mechanism-drawing" });
  const parsed = new DOMParser().parseFromString(data.svg, "image/svg+xml").documentElement;
  parsed.setAttribute("role", "group"); // an image may not hold cards that can be chosen
  figure.append(document.importNode(parsed, true));
  const { width: natural } = parsed.viewBox.baseVal;
  figure.style.setProperty("--natural", `${natural}px`); // text never gets smaller than it can be read
  const sentence = el("p", { class: "sentence" }, ...data.clauses.map(clause));
  const list = el("ol", { class: "mechanism-list" }, ...[...steps.values()].map(card));
  const row = el("div", { class: "mechanism-row" }, figure, details);
  const root = el(
    "div",
    { class: "mechanism", tabindex: 0, "aria-label": "Mechanism; arrow keys go from step to step" },
    sentence,
    el("p", { class: "origin" }, inert(notes().join(" "))),
    ...advice(),
    row,
    list,
    ledger(),
    test(),
    el("p", { class: "buttons mechanism-save" }, "Save the drawing: ", saveButton("SVG"), saveButton("PNG")),
  );
  let chosen = null;

  /** What the numbers are, and what was chosen: sentences of their own. */
  function notes() {
    const said = [data.origin, ...data.notes].map((note) => note.replace(/\.?$/, ".").replace(/^./, (letter) => letter.toUpperCase()));
    return data.clauses.some(({ text }) => text.includes("carrying")) ? [...said, "A number without \u201ccarrying\u201d goes straight into the answer."] : said;
  }

  /** The drawing as it is seen: colours of the page in the place of their names. */
  function drawingText() {
    const style = getComputedStyle(root);
    const { width, height } = parsed.viewBox.baseVal;
    const copy = figure.querySelector("svg").cloneNode(true);
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    const text = new XMLSerializer().serializeToString(copy);
    const named = (_, name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    return { text: text.replace(/var\((--[\w-]+),\s*([^)]+)\)/g, named), width, height };
  }

  function saveButton(form) {
    const save = () => {
      const { text, width, height } = drawingText();
      if (form === "SVG") download("mechanism.svg", new Blob([text], { type: "image/svg+xml" }));
      else downloadPng("mechanism.png", text, width, height);
    };
    return el("button", { type: "button", id: `save-mechanism-${form.toLowerCase()}`, "aria-label": `Save the drawing as ${form}`, onclick: save }, form);
  }

  function clause({ text, step }) {
    const parts = inert(text).split("*").map((part, i) => (i % 2 ? el("em", {}, part) : part));
    if (step === undefined || step === null) return el("span", {}, ...parts, " ");
    const chip = el("button", { type: "button", class: "step-chip", "data-step": step, "aria-label": `Step ${step}` }, String(step));
    const whole = el("span", { class: "clause", "data-step": step }, chip, " ", ...parts, " ");
    chip.addEventListener("click", () => choose(step));
    return whole;
  }

  /** Where nothing can be told: what to do instead, as buttons that copy the command for it. */
  function advice() {
    if (!data.advice?.length) return [];
    return [commandButtons(data.advice)];
  }

  function badge(step) {
    if (!step.measured) return el("span", { class: "badge hollow" }, "not measured");
    const { before, without, random } = step.measured;
    const control = random === undefined || random === null ? "no control" : `random ${random.toFixed(2)}`;
    const numbers = `removed: ${before.toFixed(2)} \u2192 ${without.toFixed(2)}; ${control}`;
    if (!step.doubt) return el("span", { class: "badge" }, numbers);
    return el("span", { class: "badge doubted" }, `${step.doubt} `, el("s", {}, numbers));
  }

  function title(step) {
    const text = inert(step.name ?? step.text).split("*").map((part, i) => (i % 2 ? `\u201c${part}\u201d` : part)).join("");
    return text.slice(0, 1).toUpperCase() + text.slice(1);
  }

  function card(step) {
    const heads = (step.heads ?? []).map((head) => head.name);
    return el(
      "li",
      { class: "step-card", "data-step": step.id },
      el("b", {}, `${step.id}. ${title(step)}`),
      el("span", { class: "names" }, [...new Set(heads)].join(", ")),
      el("span", {}, Math.abs(step.root) < 0.005 ? `carries ${number(step.flow)}` : `${number(step.root)} to the answer${step.role === "mlps" ? "" : `, ${number(step.flow)} in all`}`),
      badge(step),
    );
  }

  function ledger() {
    const terms = data.ledger.map((line) =>
      el("span", { class: "term", ...(line.step ? { "data-step": line.step } : {}) }, `${number(line.amount)} (${line.step ? `step ${line.step}` : inert(line.text)})`),
    );
    return el("p", { class: "ledger" }, "Straight into the answer: ", ...terms.flatMap((term, i) => [i ? ", " : "", term]), " ", el("b", {}, `= ${number(data.whole)}`));
  }

  function test() {
    if (!data.test) return el("p", { class: "ledger" }, "Nothing was measured in the model.");
    const t = data.test;
    const part = data.measured_with ? ` (${data.measured_with})` : "";
    return el(
      "p",
      { class: "ledger" },
      `All shown heads removed: ${t.before.toFixed(2)} \u2192 ${t.without.toFixed(2)} (random heads: ${t.random_without.toFixed(2)}). ` +
        `Kept alone: ${t.kept.toFixed(2)} (random heads: ${t.random_kept.toFixed(2)}; none: ${t.other.toFixed(2)})${part}.`,
    );
  }

  // One step is lit at a time: its card, its clause, its lines and its tokens.

  function light(step) {
    const on = step !== null;
    root.classList.toggle("highlighting", on);
    const tokens = new Set((steps.get(step)?.heads ?? []).flatMap((head) => [String(head.dest), String(head.src)]));
    for (const node of root.querySelectorAll("[data-step], [data-token], [data-from]")) {
      const own = node.dataset.step === String(step) || node.dataset.from === String(step);
      node.classList.toggle("on", on && (own || (node.classList.contains("token") && tokens.has(node.dataset.token))));
    }
  }

  function choose(step) {
    chosen = step;
    root.dataset.chosen = step ?? "";
    light(step);
    const found = steps.get(step);
    details.replaceChildren(...(found ? describe(found) : []));
    const card = list.querySelector(`[data-step="${step}"]`);
    (found && getComputedStyle(list).display !== "none" ? card : row).append(details); // in the list, a card unfolds where it is
  }

  function describe(step) {
    const rows = (step.heads ?? []).map((head) =>
      el(
        "li",
        {},
        el("b", {}, `${head.name} ${head.dest}\u2192${head.src}`),
        ` flow ${number(head.flow)}`,
        head.attention === undefined || head.attention === null ? "" : `, attention ${head.attention.toFixed(2)} (${(head.other_attention ?? 0).toFixed(2)} in the other prompts)`,
        ...crop(head),
        ...words("raises", head.raises),
        ...words("lowers", head.lowers),
        ...(head.roles ?? []).map((role) => el("div", { class: "role" }, `over a corpus: ${inert(role)}`)),
        ...(head.causes ?? []).map((cause) => el("div", { class: "cause" }, `because of its ${inert(cause)}`)),
      ),
    );
    return [el("h3", { role: "heading", "aria-level": 2 }, `${step.id}. ${title(step)}`), badge(step), el("ul", {}, ...rows)];
  }

  /** Where a head looks from its token, here (filled) and in the other prompts (outlined). */
  function crop({ dest, src, looks }) {
    if (!looks?.length) return [];
    const bar = (kind, share) => {
      const drawn = el("span", { class: `bar ${kind}` });
      drawn.style.width = `${(100 * share).toFixed(1)}%`;
      return drawn;
    };
    const line = ([place, here, there]) =>
      el("tr", place === src ? { class: "read" } : {}, el("th", { scope: "row" }, inert(data.tokens[place] ?? String(place))), el("td", {}, bar("here", here), bar("there", there)), el("td", {}, here.toFixed(2)));
    const rows = [...looks].sort(([a], [b]) => a - b).map(line);
    return [el("table", { class: "crop" }, el("caption", {}, `At \u201c${inert(data.tokens[dest] ?? String(dest))}\u201d it attends to (outlined: in the other prompts)`), el("tbody", {}, ...rows))];
  }

  function words(name, tokens) {
    const whole = (tokens ?? []).filter((token) => !token.includes("\ufffd")).map((token) => inert(token).trim()); // a piece of a letter cannot be read
    return whole.length ? [el("div", {}, `${name} ${[...new Set(whole)].slice(0, 3).join(", ")}`)] : [];
  }

  root.addEventListener("mouseover", (event) => {
    const step = event.target.closest("[data-step]")?.dataset.step;
    light(step ? Number(step) : chosen);
  });
  root.addEventListener("mouseleave", () => light(chosen));
  root.addEventListener("click", (event) => {
    const step = event.target.closest("g.card, li.step-card")?.dataset.step;
    if (step) choose(Number(step));
  });
  root.addEventListener("keydown", (event) => {
    const order = [...steps.keys()];
    const at = order.indexOf(chosen);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && order.length) {
      choose(order[(at + step + order.length) % order.length] ?? order[0]);
      event.preventDefault();
    } else if (event.key === "Escape") {
      choose(null);
    } else if (event.key === "Enter") {
      const card = event.target.closest?.("g.card");
      if (card) choose(Number(card.dataset.step));
    }
  });
  if (steps.has(lit)) choose(lit);
  return root;
}

/** Every edge as a row, the strongest first. */
export function createTable(circuit) {
  const token = (place) => `\u201c${circuit.prompt.tokens[place]?.trim()}\u201d`;
  const names = new Map(circuit.nodes.map((node) => [node.id, node.name + place(node)]));
  const rows = [...circuit.edges].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 500);
  const digits = Math.max(0, Math.min(6, 3 - Math.floor(Math.log10(Math.abs(rows[0]?.weight) || 1)))); // four of the largest
  const cells = (edge) => [names.get(edge.source), names.get(edge.target), edge.side, edge.weight.toFixed(digits), (edge.channels ?? []).join(" ")];
  const left = circuit.edges.length - rows.length;

  function place({ kind, dest, src }) {
    if (kind === "head") return src === undefined || src === null ? "" : ` at ${token(dest)}, reads ${token(src)}`;
    return kind === "root" || dest === undefined || dest === null ? "" : ` ${token(dest)}`;
  }

  return el(
    "div",
    { class: "edge-table", tabindex: 0, role: "region", "aria-label": "All edges" },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ...["from", "to", "side", "weight", "channels"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows.map((edge) => el("tr", {}, ...cells(edge).map((cell) => el("td", {}, inert(String(cell ?? ""))))))),
    ),
    left > 0 ? el("p", {}, `${left} weaker edges are not listed.`) : null,
  );
}

/** Mechanism, graph or table: one of them fills the view. */
export function createTabs(container, mechanism, circuit, remember) {
  const panels = { mechanism: createMechanism(mechanism), table: createTable(circuit) };
  const names = { mechanism: "Mechanism", graph: "Graph", table: "Table" };
  const buttons = Object.entries(names).map(([id, name]) => el("button", { type: "button", id: `tab-${id}`, onclick: () => show(id) }, name));
  container.querySelector(".top").after(panels.mechanism, panels.table);

  function show(id) {
    container.dataset.tab = id;
    for (const [name, panel] of Object.entries(panels)) panel.hidden = name !== id;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.id === `tab-${id}`)));
    remember();
  }

  const verdict = el("span", { class: `badge verdict${/^(all|confirmed)/.test(mechanism.verdict) ? "" : " hollow"}`, title: "Steps whose removal moves the answer as their flow says, and at least twice as far as random ones do" }, mechanism.verdict);
  container.querySelector(".buttons").before(verdict, el("div", { class: "buttons tabs", role: "group", "aria-label": "What is shown" }, ...buttons));
  return show;
}
