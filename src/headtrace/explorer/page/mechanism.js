// The mechanism of a circuit: a sentence with numbered chips, the drawing, the ledger, and the card that is chosen.

import { el } from "./dom.js";
import { download, downloadPng } from "./export.js";
import { inert } from "./text.js";

const number = (value) => `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(2)}`;

export function createMechanism(data) {
  const steps = new Map(data.steps.filter((step) => !step.hidden).map((step) => [step.id, step]));
  const details = el("section", { class: "step-details", "aria-live": "polite" });
  const figure = el("div", { class: "mechanism-drawing" });
  const parsed = new DOMParser().parseFromString(data.svg, "image/svg+xml").documentElement;
  parsed.setAttribute("role", "group"); // an image may not hold cards that can be chosen
  figure.append(document.importNode(parsed, true));
  const sentence = el("p", { class: "sentence" }, ...data.clauses.map(clause));
  const list = el("ol", { class: "mechanism-list" }, ...[...steps.values()].map(card));
  const root = el(
    "div",
    { class: "mechanism", tabindex: 0, "aria-label": "Mechanism; arrow keys go from step to step" },
    el("p", { class: "origin" }, inert([data.origin, ...data.chosen].join(". ").replaceAll("..", "."))),
    sentence,
    ...advice(),
    el("div", { class: "mechanism-row" }, figure, details),
    list,
    ledger(),
    test(),
    el("p", { class: "buttons mechanism-save" }, "Save the drawing: ", saveButton("SVG"), saveButton("PNG")),
  );
  let chosen = null;

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
    const copy = async ({ command }, said) => {
      await navigator.clipboard?.writeText(command).catch(() => {});
      said.textContent = command;
    };
    const rows = data.advice.map((each) => {
      const said = el("code", { role: "status" });
      return el("p", {}, el("button", { type: "button", onclick: () => copy(each, said) }, `Copy the command: ${each.does}`), " ", said);
    });
    return [el("div", { class: "advice" }, ...rows)];
  }

  function badge(step) {
    if (!step.measured) return el("span", { class: "badge hollow" }, "not measured");
    const { before, without, random } = step.measured;
    const control = random === undefined || random === null ? "" : `; random ${random.toFixed(2)}`;
    return el("span", { class: "badge" }, `removed: ${before.toFixed(2)} \u2192 ${without.toFixed(2)}${control}`);
  }

  function title(step) {
    return inert(step.name ?? step.text).split("*").map((part, i) => (i % 2 ? `\u201c${part}\u201d` : part)).join("");
  }

  function card(step) {
    const heads = (step.heads ?? []).map((head) => head.name);
    return el(
      "li",
      { class: "step-card", "data-step": step.id },
      el("b", {}, `${step.id}. ${title(step)}`),
      el("span", { class: "names" }, [...new Set(heads)].join(", ")),
      el("span", {}, `carries ${number(step.flow)}`),
      badge(step),
    );
  }

  function ledger() {
    const terms = data.ledger.map((line) =>
      el("span", { class: "term", ...(line.step ? { "data-step": line.step } : {}) }, `${number(line.amount)} ${line.step ? `step ${line.step}` : inert(line.text)}`),
    );
    return el("p", { class: "ledger" }, "Straight into the answer: ", ...terms.flatMap((term) => [term, " "]), el("b", {}, `= ${number(data.whole)}`));
  }

  function test() {
    if (!data.test) return el("p", { class: "ledger" }, "Nothing was measured in the model.");
    const t = data.test;
    return el(
      "p",
      { class: "ledger" },
      `All shown heads removed: ${t.before.toFixed(2)} \u2192 ${t.without.toFixed(2)} (random heads: ${t.random_without.toFixed(2)}). ` +
        `Kept alone: ${t.kept.toFixed(2)} (random heads: ${t.random_kept.toFixed(2)}; none: ${t.other.toFixed(2)}).`,
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
    light(step);
    const found = steps.get(step);
    details.replaceChildren(...(found ? describe(found) : []));
  }

  function describe(step) {
    const rows = (step.heads ?? []).map((head) =>
      el(
        "li",
        {},
        el("b", {}, `${head.name} ${head.dest}\u2192${head.src}`),
        ` flow ${number(head.flow)}`,
        head.attention === undefined || head.attention === null ? "" : `, attention ${head.attention.toFixed(2)} (was ${(head.other_attention ?? 0).toFixed(2)})`,
        ...words("raises", head.raises),
        ...words("lowers", head.lowers),
        ...(head.causes ?? []).map((cause) => el("div", { class: "cause" }, `because of its ${inert(cause)}`)),
      ),
    );
    return [el("h3", { role: "heading", "aria-level": 2 }, `${step.id}. ${title(step)}`), badge(step), el("ul", {}, ...rows)];
  }

  function words(name, tokens) {
    return tokens?.length ? [el("div", {}, `${name} ${tokens.slice(0, 3).map((token) => inert(token).trim()).join(", ")}`)] : [];
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
  return root;
}

/** Every edge as a row, the strongest first. */
export function createTable(circuit) {
  const names = new Map(circuit.nodes.map((node) => [node.id, node.name]));
  const rows = [...circuit.edges].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 500);
  const cells = (edge) => [names.get(edge.source), names.get(edge.target), edge.side, edge.weight.toPrecision(4), (edge.channels ?? []).join(" ")];
  const left = circuit.edges.length - rows.length;
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

  container.querySelector(".buttons").before(el("div", { class: "buttons tabs", role: "group", "aria-label": "What is shown" }, ...buttons));
  return show;
}
