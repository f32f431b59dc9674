// Why a head attends here: its channels, what made its query and its key, what it moved.

import { el } from "../page/dom.js";
import { inert, number, percent, plural, signed, tokenExact } from "../page/text.js";
import { componentChange, factorButtons, signalChange } from "./changes.js";
import { promptOf } from "./library.js";
import { bar, button, notice, token } from "./pieces.js";
import { latestOnly } from "./server.js";

const BARS = 10;

export function createWhy(app) {
  const said = notice();
  const content = el("div", {});
  const place = el("section", { class: "why-panel", "aria-label": "Why", hidden: true }, said.place, content);
  const asking = latestOnly();
  let [shownKey, shown, about] = [null, null, null];

  function update(state) {
    const firing = state.head && state.cell && { layer: state.head[0], head: state.head[1], dest: state.cell[0], src: state.cell[1] };
    place.hidden = !firing;
    const key = JSON.stringify([promptOf(state), firing, state.answer, state.wrong, state.alone]);
    place.classList.toggle("stale", shown !== null && key !== shownKey);
    if (!firing) return asking.stop(), forget();
    if (key === shownKey) return asking.stop(), said.clear();
    if (JSON.stringify(shown?.firing) !== JSON.stringify(firing)) forget();
    asking(async (signal) => {
      said.busy("Asking why…");
      const recording = await app.recording(signal);
      const view = await app.library.post(recording, "why", { firing, ...(await app.root(signal)) }, signal);
      said.clear();
      [shownKey, shown, about] = [key, view, recording];
      place.classList.remove("stale");
      content.replaceChildren(...sections(app, view, recording));
      app.shareable();
    }, (error) => {
      forget();
      said.failed(error);
    });
  }

  function forget() {
    [shownKey, shown] = [null, null];
    place.classList.remove("stale");
    content.replaceChildren();
    said.clear();
  }

  /** What is shown, where it answers what is asked. */
  const current = () => (place.classList.contains("stale") ? null : shown);

  /** What else could stand in the prompt is known only after a while. */
  const refresh = () => shown && content.querySelector(".swaps")?.replaceChildren(...swaps(app, shown.firing, about));

  return { place, update, refresh, python: () => current()?.python, data: current };
}

function sections(app, view, recording) {
  const { firing } = view;
  const { tokens } = recording;
  const name = `L${firing.layer}H${firing.head}`;
  const moved = componentChange({ kind: "head", ...firing });
  return [
    el("h2", {}, `Why does ${name} attend here?`),
    el("p", { class: "why-sentence" }, el("bdi", {}, inert(view.sentence))),
    movedSection(view.moved, name),
    side(app, view, "query", `What made its query at ${tokenExact(tokens[firing.dest])}`),
    side(app, view, "key", `What made its key at ${tokenExact(tokens[firing.src])}`),
    el("section", { class: "change-it" }, el("h3", {}, "Change it"), el("p", { class: "try" }, `What ${name} writes here: `, factorButtons(app, moved)), el("div", { class: "swaps" }, ...swaps(app, firing, recording))),
    ratherThan(app, view, recording),
    channels(view),
  ];
}

/** Words that could stand where the head looks from and where it looks: what the model says then is shown beside. */
function swaps(app, { dest, src }, recording) {
  const words = app.words(recording).filter(({ positions }) => positions.includes(dest) || positions.includes(src));
  return words.map((word) => {
    const choices = [["", "…"], ...word.changes.map((change, i) => [String(i), `${inert(change.after)}${change.flips ? " (flips it)" : ""}`])];
    const field = el("select", { "aria-label": `Another word for ${word.text}`, onchange: () => field.value && app.go({ swap: word.changes[field.value].text }, { replace: true }) }, ...choices.map(([value, text]) => el("option", { value }, text)));
    return el("p", { class: "try" }, "Swap ", token(word.text), " for ", field);
  });
}

/** Why here rather than there, and which writers met: asked for when it is opened. */
function ratherThan(app, view, recording) {
  const { firing } = view;
  const { tokens } = recording;
  const asking = latestOnly();
  const said = notice();
  const content = el("div", {});
  const others = tokens.map((text, i) => [i, text]).slice(0, firing.dest + 1).filter(([i]) => i !== firing.src);
  const field = el("select", { "aria-label": "Rather than", onchange: load }, el("option", { value: "" }, "its score alone"), ...others.map(([i, text]) => el("option", { value: i }, `${i} ${tokenExact(text)}`)));
  const place = el("details", { class: "rather-than" }, el("summary", {}, "Rather than another token; who met whom"), others.length ? el("p", {}, "Rather than ", field) : null, said.place, content);
  place.addEventListener("toggle", () => place.open && !content.firstChild && load());

  function load() {
    asking(async (signal) => {
      said.busy("Comparing…");
      const other = field.value === "" ? null : Number(field.value);
      const found = await app.library.post(recording, "pairs", { firing, other }, signal);
      said.clear();
      content.replaceChildren(...compared(found, other === null ? null : tokens[other]));
    }, said.failed);
  }
  return place;
}

function compared({ attention, other_attention, log_ratio, query, key, query_rest, key_rest, pairs, total, remainder }, other) {
  const row = (name, value, note) => el("li", { class: "ratio-term" }, el("span", { class: "weight" }, signed(value)), el("span", {}, el("bdi", {}, inert(name)), note ? el("span", { class: "hint" }, ` ${note}`) : null));
  const list = (title, rows, rest, word) => [el("h4", {}, title), el("ul", { class: "terms" }, ...rows, row(word, rest))];
  return [
    ...(other === null ? [] : [
      el("p", {}, `${number(attention)} here, ${number(other_attention)} on `, token(other), `: ${number(Math.exp(Math.abs(log_ratio)))} times ${log_ratio < 0 ? "less" : "more"}. The logarithm of that, ${signed(log_ratio)}, is the sum of:`),
      ...list("By what made its query", query.map(({ name, value }) => row(name, value)), query_rest, "all others"),
      ...list("By what made its keys", key.map(({ name, value }) => row(name, value)), key_rest, "all others"),
    ]),
    ...list(`Pairs: writer of the query × writer of the key, in all ${signed(total)}`, pairs.map((pair) => row(`${pair.query} × ${pair.key}`, pair.value, `channels ${pair.channels.join(", ")}`)), remainder, "all other pairs"),
  ];
}

/** By how much this key is preferred to the others, as a sum over channels. */
function channels({ channels: all, logit, threshold }) {
  const listed = all.slice(0, BARS);
  const most = Math.max(...listed.map(({ relative_term: term }) => Math.abs(term)), 1e-9);
  const rows = listed.map(({ channel, channels: group, relative_term: term, term: whole, singular_value, in_signal_set, evidence }) =>
    el(
      "li",
      { class: in_signal_set ? "in" : "" },
      el(
        "div",
        { class: "channel", title: `${signed(whole)} of the score ${number(logit)}; singular value ${number(singular_value)}${in_signal_set ? ", one of the channels that hold the attention up" : ""}` },
        el("span", { class: "what" }, group.length > 1 ? `channels ${channel}–${group.at(-1)} (equal)` : `channel ${channel}`),
        balance(term / most),
        el("span", { class: "weight" }, signed(term)),
      ),
      evidence ? evidenceOf(evidence) : null,
    ));
  const others = all.slice(BARS);
  const left = others.reduce((sum, { relative_term: term }) => sum + term, 0);
  const rest = el("div", { class: "channel rest" }, el("span", { class: "what" }, plural(others.length, "other")), balance(left / most), el("span", { class: "weight" }, signed(left)));
  return el(
    "details",
    { class: "channels-section" },
    el("summary", {}, `Through which channels: ${plural(all.filter((each) => each.in_signal_set).length, "channel")} of ${all.length} hold it up`),
    el("p", { class: "hint" }, `Its score is ${number(logit)}; it counts as attending from ${number(threshold)} of attention on.`),
    el("p", { class: "hint" }, "How far each channel lifts the score of this token above that of the others it could attend to. Filled: the few that hold it up."),
    el("ul", { class: "channels" }, ...rows, others.length ? el("li", {}, rest) : null),
  );
}

function balance(share) {
  const made = el("span", { class: `balance${share < 0 ? " opposing" : ""}`, "aria-hidden": "true" }, el("span", {}));
  made.firstChild.style.width = `${50 * Math.min(1, Math.abs(share))}%`;
  return made;
}

function evidenceOf({ words, tokens = [], examples = [], p_value, supported }) {
  const verdict = supported === true ? "supported by a test" : supported === false ? "not supported by a test" : null;
  const measured = [verdict, p_value != null ? `p = ${number(p_value)}` : null].filter(Boolean).join(", ");
  return el(
    "div",
    { class: "evidence" },
    el("p", {}, el("bdi", {}, inert(words)), measured ? el("span", { class: "hint" }, ` (${measured})`) : null),
    tokens.length ? el("p", {}, ...tokens.slice(0, 8).flatMap((text) => [token(text), " "])) : null,
    ...examples.slice(0, 2).map((text) => el("p", { class: "hint" }, el("bdi", {}, ...marked(text)))),
  );
}

/** Text of a corpus: the token that looks stands between << and >>, the one it looks at between [[ and ]]; both in bold. */
function marked(text) {
  const parts = text.split(/(\[\[.*?\]\]|<<.*?>>)/);
  return parts.map((part, i) => (i % 2 ? el("b", { class: part.includes("[[") ? "looked-at" : "looks" }, inert(part.replace(/^<<|>>$|\[\[|\]\]/g, ""))) : inert(part)));
}

/** The causes on one side, heads before all others, MLPs folded; and what would be left without them. */
function side(app, view, name, title) {
  const { causes, predicted, explained } = view[name];
  const most = Math.max(...causes.map(({ weight }) => Math.abs(weight)), 1e-9);
  const row = (cause) => el("li", {}, causeRow(app, view, name, cause, most));
  const [heads, mlps, others] = [causes.filter(({ kind }) => kind === "head"), causes.filter(({ kind }) => kind === "mlp"), causes.filter(({ kind }) => kind !== "head" && kind !== "mlp")];
  const together = mlps.reduce((sum, { weight }) => sum + weight, 0);
  const folded = mlps.length < 2 ? mlps.map(row) : [el("li", {}, el("details", { class: "mlps" }, el("summary", {}, `${plural(mlps.length, "MLP")}, ${number(together)}`), el("ul", { class: "causes" }, ...mlps.map(row))))];
  const without = predicted === null ? null : el("p", { class: "hint" }, `Without ${causes.length === 1 ? "it" : "these"}, ${number(predicted)} of ${number(view.attention)} would be left.`);
  const nothing = el("p", { class: "hint" }, explained ? "Nothing in particular: no component's signal is needed." : "Nothing found: the attention holds whatever is removed.");
  return el("section", { class: name }, el("h3", {}, title), causes.length ? el("ul", { class: "causes" }, ...heads.map(row), ...others.map(row), ...folded) : nothing, causes.length ? without : null);
}

function causeRow(app, view, side, cause, most) {
  const { layer, head, dest, src } = cause;
  const open = cause.kind === "head" && src !== null && dest !== null;
  const name = open
    ? button(cause.name, () => app.go({ head: [layer, head], cell: [dest, src] }), { class: "link", title: "Why does this head attend there?" })
    : el("span", {}, cause.name);
  const change = signalChange(cause, view.firing, side, cause.channels);
  return el(
    "div",
    { class: "cause" },
    el("span", { class: "swatch" }),
    el("span", { class: "what" }, name, " ", token(cause.token)),
    bar(Math.abs(cause.weight) / most, side),
    el("span", { class: "weight" }, number(cause.weight)),
    el("span", { class: "hint", title: cause.channels.join(", ") }, `${cause.channels.length === 1 ? "channel" : "channels"} ${cause.channels.join(", ")}`),
    factorButtons(app, change),
  );
}

function movedSection({ norm, promotes, suppresses, contribution, measure }, name) {
  const words = (list) => list.slice(0, 6).flatMap(([text, logit]) => [el("span", { class: "promoted", title: signed(logit) }, token(text)), " "]);
  return el(
    "section",
    { class: "value" },
    contribution == null ? null : el("p", {}, "It contributed ", el("b", {}, signed(contribution)), ` to the ${measure} in this run, by way of later layers, too.`),
    promotes.length ? el("p", {}, el("span", { class: "hint" }, "of all tokens it raises most "), ...words(promotes)) : null,
    suppresses.length ? el("p", {}, el("span", { class: "hint" }, "and lowers most "), ...words(suppresses)) : null,
    el("p", { class: "hint" }, `The norm of what ${name} wrote is ${percent(norm)} of the residual stream's there.`),
  );
}
