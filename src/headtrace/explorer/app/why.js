// Why a head attends here: its channels, what made its query and its key, what it moved.

import { el } from "../page/dom.js";
import { inert, number, percent, plural, shorten, signed, tokenExact } from "../page/text.js";
import { componentChange, factorButtons, signalChange } from "./changes.js";
import { promptOf, rootOf } from "./library.js";
import { bar, button, notice, token } from "./pieces.js";
import { latestOnly } from "./server.js";

const BARS = 10;

export function createWhy(app) {
  const said = notice();
  const content = el("div", {});
  const place = el("section", { class: "why-panel", "aria-label": "Why", hidden: true }, said.place, content);
  const asking = latestOnly();
  let [shownKey, shown] = [null, null];

  function update(state) {
    const firing = state.head && state.cell && { layer: state.head[0], head: state.head[1], dest: state.cell[0], src: state.cell[1] };
    place.hidden = !firing;
    const key = JSON.stringify([promptOf(state), firing, state.answer, state.wrong]);
    if (!firing) return asking.stop(), forget();
    if (key === shownKey) return;
    forget();
    asking(async (signal) => {
      said.busy("Asking why…");
      const recording = await app.recording(signal);
      const view = await app.library.post(recording, "why", { firing, ...rootOf(state, recording) }, signal);
      said.clear();
      [shownKey, shown] = [key, view];
      content.replaceChildren(...sections(app, view, recording));
      app.shareable();
    }, (error) => {
      content.replaceChildren();
      said.failed(error);
    });
  }

  function forget() {
    [shownKey, shown] = [null, null];
    content.replaceChildren();
    said.clear();
  }

  return { place, update, python: () => shown?.python, data: () => shown };
}

function sections(app, view, { tokens }) {
  const { firing } = view;
  const name = `L${firing.layer}H${firing.head}`;
  const moved = componentChange({ kind: "head", ...firing });
  return [
    el("h2", {}, `Why does ${name} attend here?`),
    el("p", { class: "asked" }, token(tokens[firing.dest]), ` at ${firing.dest} → `, token(tokens[firing.src]), ` at ${firing.src}`),
    el("p", { class: "big" }, el("b", {}, number(view.attention)), ` of its attention. `, el("span", { class: "hint" }, `It counts as attending from ${number(view.threshold)} on.`)),
    channels(view),
    side(app, view, "query", `What made its query at ${tokenExact(tokens[firing.dest])}`),
    side(app, view, "key", `What made its key at ${tokenExact(tokens[firing.src])}`),
    movedSection(view.moved, name),
    el("section", {}, el("h3", {}, "Try it"), el("p", { class: "try" }, `What ${name} writes here: `, factorButtons(app, moved))),
  ];
}

/** By how much this key is preferred to the others, as a sum over channels. */
function channels({ channels: all, logit }) {
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
    "section",
    {},
    el("h3", {}, "Through which channels"),
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
    ...examples.slice(0, 2).map((text) => el("p", { class: "hint" }, el("bdi", {}, shorten(inert(text), 140)))),
  );
}

/** The causes on one side, and what would be left without them. */
function side(app, view, name, title) {
  const { causes, predicted, explained } = view[name];
  const most = Math.max(...causes.map(({ weight }) => Math.abs(weight)), 1e-9);
  const rows = causes.map((cause) => el("li", {}, causeRow(app, view, name, cause, most)));
  const without = predicted === null ? null : el("p", { class: "hint" }, `Without ${causes.length === 1 ? "it" : "these"}, ${number(predicted)} of ${number(view.attention)} would be left.`);
  const nothing = el("p", { class: "hint" }, explained ? "Nothing in particular: no component's signal is needed." : "Nothing found: the attention holds whatever is removed.");
  return el("section", { class: name }, el("h3", {}, title), causes.length ? el("ul", { class: "causes" }, ...rows) : nothing, causes.length ? without : null);
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
    el("h3", {}, "What it moved"),
    el("p", {}, `What ${name} wrote is ${percent(norm)} as long as all that stands there.`),
    promotes.length ? el("p", {}, el("span", { class: "hint" }, "raises "), ...words(promotes)) : null,
    suppresses.length ? el("p", {}, el("span", { class: "hint" }, "lowers "), ...words(suppresses)) : null,
    contribution == null ? null : el("p", {}, "It contributed ", el("b", {}, signed(contribution)), ` to the ${measure}.`),
  );
}
