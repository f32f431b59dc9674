// "Why this rather than that?": both chosen from what the model finds likely, or typed. Choosing asks at once.

import { el } from "../page/dom.js";
import { percent, shorten, tokenExact, tokenLabel } from "../page/text.js";
import { promptOf } from "./library.js";
import { meant, shown } from "./pieces.js";

const OTHER = "\u0000other";
const ALONE = "\u0000alone";

export function createQuestion(app) {
  const ask = (patch) => app.go({ ...patch, look: undefined });
  const answer = picker("Answer", (token) => ask({ answer: token, wrong: undefined, alone: undefined }));
  const wrong = picker("Rival", (token) => ask(token === ALONE ? { answer: current.answer, wrong: undefined, alone: true } : { answer: current.answer, wrong: token, alone: undefined }), [[ALONE, "nothing: how likely is it?"]]);
  const says = el("span", { class: "says hint" });
  const place = el("div", { class: "question-row", hidden: true }, "Why ", answer.place, " rather than ", wrong.place, "?", says);
  let current = { answer: undefined, wrong: undefined };
  let answered = null; // the question that the pickers show
  const keyOf = (state) => JSON.stringify([promptOf(state), state.answer, state.wrong, state.alone]);

  /** Show what is asked: { answer: [..], wrong } with what the model finds likely. */
  function show(recording, asked) {
    place.hidden = false;
    answered = keyOf(app.state);
    const listed = recording.answers;
    const token = asked.answer.map((each) => each.token).join("");
    current = { answer: token, wrong: asked.wrong?.token };
    answer.set(listed, token, asked.answer.length === 1 ? asked.answer[0].probability : null);
    wrong.set(listed.filter((each) => each.token !== token), asked.wrong?.token ?? ALONE, asked.wrong?.probability);
    const first = listed[0];
    says.textContent = first && first.token !== token ? `It says ${tokenExact(first.token)}, ${percent(first.probability)}.` : "";
  }

  /** Whether the pickers are still those of an earlier question. */
  const outdated = () => !place.hidden && answered !== keyOf(app.state);

  return { place, show, outdated, hide: () => (place.hidden = true) };
}

/** A list of tokens with their probabilities, and a field for any other. */
function picker(label, choose, more = []) {
  const field = el("select", { "aria-label": label, class: "pick" });
  const typed = el("input", { type: "text", class: "answer", dir: "auto", spellcheck: "false", autocomplete: "off", "aria-label": `${label}, typed`, hidden: true });
  field.addEventListener("change", () => {
    typed.hidden = field.value !== OTHER;
    if (!typed.hidden) return typed.focus();
    choose(field.value);
  });
  typed.addEventListener("keydown", ({ key }) => key === "Enter" && typed.value && choose(meant(typed.value)));
  typed.addEventListener("change", () => typed.value && choose(meant(typed.value)));
  const set = (listed, token, probability) => {
    const known = listed.some((each) => each.token === token) || more.some(([value]) => value === token);
    const rows = known ? listed : [{ token, probability }, ...listed];
    field.replaceChildren(
      ...rows.map((each) => el("option", { value: each.token }, `${shorten(tokenLabel(each.token), 24)}\u200e${each.probability == null ? "" : `  ${percent(each.probability)}`}`)),
      ...more.map(([value, text]) => el("option", { value }, text)),
      el("option", { value: OTHER }, "another token…"),
    );
    field.value = token;
    typed.hidden = true;
    typed.value = shown("");
  };
  return { place: el("span", { class: "picker" }, field, typed), set };
}
