// Changes to the running model: what was removed, halved or doubled, and what that does, beside the model as it is.

import { el } from "../page/dom.js";
import { inert, inertLines, number, percent, signed, tokenExact } from "../page/text.js";
import { bar, button, notice } from "./pieces.js";
import { FRESH } from "./prompt.js";
import { latestOnly } from "./server.js";

export const FACTORS = [[0, "remove", "removed"], [0.5, "halve", "halved"], [2, "double", "doubled"]];
const GENERATED = 8;

const site = ({ kind, layer, head, dest, src }) => Object.fromEntries(Object.entries({ kind, layer, head, dest, src }).filter(([, value]) => value !== null && value !== undefined));
const firing = ({ layer, head, dest, src }) => ({ layer, head, dest, src });

/** A signal into one side of a firing, to be changed by a factor. */
export function signalChange(source, target, side, channels) {
  return { kind: "signal", source: site(source), target: firing(target), side, channels };
}

/** All that a component writes at its place. */
export function componentChange(node) {
  return { kind: "component", site: site(node) };
}

const what = (change) => JSON.stringify({ ...change, factor: 0 });

/** A list with one more change; a change of the same thing takes the place of the old one. */
export function withChange(changes, change) {
  const others = changes.filter((other) => what({ ...other, factor: 0 }) !== what({ ...change, factor: 0 }));
  return [...others, change];
}

/** Buttons that make a change: remove, halve, double. */
export function factorButtons(app, change) {
  const made = FACTORS.map(([factor, verb]) => button(`×${factor === 0.5 ? "½" : factor}`, () => app.change({ ...change, factor }), { class: "factor", title: `${verb[0].toUpperCase()}${verb.slice(1)} it`, "aria-label": `${verb}: ${named(change)}` }));
  return el("span", { class: "factors" }, ...made);
}

function siteName({ kind, layer, head, dest, src }) {
  const at = dest === undefined ? "" : src === undefined ? ` @${dest}` : ` ${dest}→${src}`;
  if (kind === "head") return `L${layer}H${head}${at}`;
  if (kind === "mlp") return `MLP ${layer}${at}`;
  return `${String(kind).replace("_", " ")}${layer === undefined ? "" : ` ${layer}`}${at}`;
}

/** What a change is about, in words. */
export function named(change) {
  if (change.kind === "component") return `what ${siteName(change.site ?? {})} writes`;
  const { layer, head, dest, src } = change.target ?? {};
  return `signal of ${siteName(change.source ?? {})} into the ${change.side} of L${layer}H${head} ${dest}→${src}`;
}

function factorWord(factor) {
  return FACTORS.find(([known]) => known === factor)?.[2] ?? `×${number(factor)}`;
}

export function createChanges(app) {
  const said = notice();
  const list = el("ul", { class: "change-list" });
  const results = el("div", { class: "change-results" });
  const count = el("input", { type: "number", min: 1, max: 50, value: GENERATED, "aria-label": "How many tokens" });
  const generate = el("span", { class: "group" }, button("Continue the text", () => app.go({ generate: Number(count.value) || GENERATED }, { replace: true })), " by ", count, " tokens");
  const title = el("h2", {}, "Your changes");
  const swapped = el("p", { class: "swapped" });
  const line = el("div", { class: "changes-line" }, list, generate, button("Undo all", () => app.go({ changes: [], generate: undefined, show: undefined, swap: undefined })));
  const place = el("section", { class: "changes", "aria-label": "Changes to the model", hidden: true }, title, swapped, line, said.place, results);
  const loading = latestOnly();
  let shown = null;

  function update(state) {
    const { changes } = state;
    place.hidden = !(changes.length || state.swap) || !state.text || state.view === "beside" || state.view === "run";
    if (place.hidden) {
      loading.stop();
      shown = null;
      results.replaceChildren();
      return;
    }
    const rows = changes.map((change, i) => {
      const undo = button("✕", () => app.go({ changes: changes.filter((_, other) => other !== i) }), { class: "quiet", "aria-label": `Undo: ${named(change)}` });
      return el("li", {}, el("b", {}, factorWord(change.factor ?? 0)), ` ${inert(named(change))}`, undo);
    });
    list.replaceChildren(...rows);
    generate.hidden = !changes.length;
    swapped.hidden = !state.swap;
    if (state.swap) swapped.replaceChildren("Instead: ", el("bdi", {}, inert(state.swap)), " ", button("Open this prompt", () => app.go({ ...FRESH, text: state.swap }), { class: "link" }));
    shown = null;
    results.classList.add("stale"); // until the model has run with what the list says now
    loading(async (signal) => {
      said.busy(state.swap ? "Running the changed prompt…" : "Running the model with your changes…");
      const view = state.swap ? await exchanged(state, signal) : await app.changed(signal);
      said.clear();
      shown = view;
      results.classList.remove("stale");
      results.replaceChildren(...outcome(view, state.swap ? "with the other word" : "with your changes"));
      app.shareable();
    }, (error) => {
      results.replaceChildren();
      said.failed(error);
    });
  }

  /** Another prompt beside this one. */
  async function exchanged(state, signal) {
    const clean = await app.recording(signal);
    const changed = await app.library.record({ text: state.swap, model: state.model }, signal);
    return { clean, changed, firings: [], metric: null, generated: null, python: changed.python };
  }

  return { place, update, python: () => shown?.python, data: () => shown };
}

function outcome({ clean, changed, firings, metric, generated }, now) {
  const [before, after] = [clean.answers[0], changed.answers[0]];
  const token = ({ token: text }) => el("bdi", { class: "token" }, tokenExact(text));
  return [
    el("p", { class: "says-now" }, "It said ", token(before), ` ${percent(before.probability)}; ${now} it says `, token(after), ` ${percent(after.probability)}.`),
    answerTable(clean, changed, now),
    el(
      "div",
      { class: "measured-changes" },
      metric ? el("p", {}, `${metric.measure}: `, el("b", {}, `${number(metric.before)} → ${number(metric.after)}`), el("span", { class: "hint" }, ` (${signed(metric.after - metric.before)})`)) : null,
      ...firings.map(({ firing: { layer, head, dest, src }, before: was, after: is }) =>
        el("p", {}, `attention of L${layer}H${head} ${dest}→${src}: `, el("b", {}, number(was) === number(is) ? `${number(is)}, as before` : `${number(was)} → ${number(is)}`))),
    ),
    generated
      ? el("dl", { class: "generated" }, ...["as it is", now].flatMap((label, i) => [el("dt", {}, label), el("dd", {}, el("bdi", {}, inertLines(generated[i])))]))
      : null,
  ].filter(Boolean);
}

/** Likely answers of either, with both probabilities. */
function answerTable(clean, changed, now) {
  const ids = [...new Set([...clean.answers.slice(0, 5), ...changed.answers.slice(0, 5)].map(({ id }) => id))].slice(0, 7);
  const cell = (answers, id) => {
    const found = answers.find((answer) => answer.id === id);
    return el("td", {}, bar(found?.probability ?? 0), el("span", { class: "weight" }, found ? percent(found.probability) : "less"));
  };
  const rows = ids.map((id) => {
    const { token } = [...clean.answers, ...changed.answers].find((answer) => answer.id === id);
    return el("tr", {}, el("th", { scope: "row" }, el("bdi", { class: "token" }, tokenExact(token))), cell(clean.answers, id), cell(changed.answers, id));
  });
  const head = el("tr", {}, ...["next token", "as it is", now].map((text) => el("th", { scope: "col" }, text)));
  return el("table", { class: "answer-table" }, el("thead", {}, head), el("tbody", {}, ...rows));
}
