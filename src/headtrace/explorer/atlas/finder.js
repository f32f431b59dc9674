// The finder: all heads in one table, sorted and filtered by any measure.

import { byId, el } from "./dom.js";
import { inert, number, plural, thousands, tokenLabel } from "./text.js";

export function showFinder(data) {
  byId("question").textContent = `Heads of ${inert(data.model)}`;
  byId("subtitle").textContent =
    `${plural(data.heads.length, "head")}, ${plural(data.channels, "channel")}, over ${thousands(data.tokens)} tokens of ${inert(data.corpus)}`;
  const state = { by: data.measures[0].name, down: true, words: "", measure: data.measures[0].name, least: null };
  const body = el("tbody");
  const shown = el("output", { id: "shown", "aria-live": "polite" });
  const titles = headings(data.measures, (name) => {
    state.down = state.by === name ? !state.down : name !== "head";
    state.by = name;
    draw();
  });
  const draw = () => {
    const rows = chosen(data.heads, state);
    body.replaceChildren(...rows.map((head) => row(head, data.measures, data.highest)));
    for (const title of titles.cells) {
      const mine = title.dataset.measure === state.by;
      title.setAttribute("aria-sort", mine ? (state.down ? "descending" : "ascending") : "none");
    }
    shown.textContent = `${rows.length} of ${data.heads.length} heads`;
  };
  const controls = filters(data.measures, state, draw, shown);
  const legend = el("dl", { class: "facts" }, ...data.measures.flatMap((m) => [el("dt", {}, m.title), el("dd", {}, m.about)]));
  byId("main").append(
    controls,
    el("div", { class: "table" }, el("table", { id: "heads" }, titles.element, body)),
    el("details", { class: "about" }, el("summary", {}, "What the measures are"), legend),
  );
  draw();
}

function headings(measures, sortBy) {
  const title = (name, text, about) =>
    el("th", { scope: "col", "data-measure": name, title: about }, el("button", { type: "button", class: "quiet", onclick: () => sortBy(name) }, text));
  const cells = [title("head", "head", "By layer and number"), ...measures.map((m) => title(m.name, m.title, m.about))];
  return { cells, element: el("thead", {}, el("tr", {}, ...cells, el("th", { scope: "col" }, "roles"), el("th", { scope: "col" }, "stands out in its channels"))) };
}

function filters(measures, state, draw, shown) {
  const words = el("input", { type: "search", id: "words", placeholder: "Find L9H6, a role, a token", "aria-label": "Find a head, a role, a token or a relation", autocomplete: "off", spellcheck: "false" });
  const measure = el("select", { id: "measure", "aria-label": "Measure" }, ...measures.map((m) => el("option", { value: m.name }, m.title)));
  const least = el("input", { type: "number", id: "least", step: "any", "aria-label": "At least", placeholder: "any" });
  const read = () => {
    state.words = words.value.trim().toLowerCase();
    state.measure = measure.value;
    state.least = least.value === "" ? null : Number(least.value);
    draw();
  };
  for (const field of [words, measure, least]) field.addEventListener("input", read);
  return el("div", { class: "controls", role: "group", "aria-label": "Filters" }, words, el("span", { class: "group" }, "only", measure, "at least", least), shown);
}

function chosen(heads, state) {
  const fits = (head) =>
    (state.words === "" || head.name.toLowerCase().startsWith(state.words) || head.roles.concat(head.words).some((word) => word.toLowerCase().includes(state.words))) &&
    (state.least === null || (head[state.measure] !== null && head[state.measure] >= state.least));
  const place = (head) => head.layer * 100000 + head.number;
  const value = state.by === "head" ? place : (head) => head[state.by];
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || place(a) - place(b);
    return (state.down ? y - x : x - y) || place(a) - place(b);
  };
  return heads.filter(fits).sort(compare);
}

function row(head, measures, highest) {
  const cells = measures.map(({ name }) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${head[name] === null ? 0 : (100 * Math.max(0, head[name])) / (highest[name] || 1)}%`;
    return el("td", { class: "amount" }, number(head[name]), bar);
  });
  const words = head.words.slice(0, 4).map((word) => el("span", { class: "token" }, tokenLabel(word)));
  return el("tr", { "data-head": head.name }, el("th", { scope: "row" }, el("a", { href: `heads/${head.name}.html` }, head.name)), ...cells, el("td", { class: "roles" }, head.roles.join(", ")), el("td", { class: "words" }, ...words));
}
