// The prompt: typed, or an example of a task; its tokens, and what the model answers.

import { el } from "../page/dom.js";
import { inert, percent, plural, shorten, tokenExact, tokenLabel } from "../page/text.js";
import { afterwards, bar, button, notice, select } from "./pieces.js";
import { ask, latestOnly } from "./server.js";

const PAUSE = 700; // milliseconds after the last letter
const EXAMPLES = 8;

/** What a new prompt leaves behind: all that was about the old one's tokens. */
export const FRESH = { cell: undefined, answer: undefined, wrong: undefined, traced: undefined, changes: [], generate: undefined, show: undefined, look: undefined };

export function createPrompt(app) {
  const field = el("textarea", { id: "text", rows: 2, spellcheck: "false", autocomplete: "off", placeholder: "Type a prompt, for example: When Mary and John went to the store, John gave a drink to" });
  const said = notice({ ofPrompt: true });
  const tokens = el("ol", { class: "tokens", "aria-label": "Tokens" });
  const answers = el("div", { class: "answers" });
  const examples = el("div", { class: "task-examples", hidden: true });
  const tasks = select("", [["", "Examples of a task…"], ...app.server.tasks.map(({ name, description }) => [name, `${name}: ${shorten(inert(description), 60)}`])], "", offer);
  tasks.field.setAttribute("aria-label", "Examples of a task");
  const models = app.server.models.map(({ name }, i) => [String(i), shorten(inert(name), 40)]);
  const model = select("Model", models, "0", (value) => app.go({ ...FRESH, model: Number(value) }));
  model.group.hidden = models.length < 2;
  const line = el("div", { class: "prompt-line" }, button("Look", send, { class: "main" }), tasks.group, model.group, el("span", { class: "hint" }, `up to ${app.server.max_tokens} tokens · Enter looks, Shift+Enter breaks the line`));
  const place = el(
    "section",
    { class: "prompt-panel", "aria-label": "Prompt" },
    el("div", { class: "prompt-text" }, el("label", { class: "unseen", for: "text" }, "Prompt"), field, line, examples, said.place, tokens),
    answers,
  );

  const typed = afterwards(PAUSE, () => take(true));
  field.addEventListener("input", () => {
    pending = true;
    typed();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });

  function send() {
    typed.cancel();
    take(false);
  }

  let [pending, typing] = [false, false];
  /** Take what is in the field; while one types on, it stays one step of the history. */
  function take(stillTyping) {
    pending = false;
    if (field.value === (app.state.text ?? "")) return (typing = stillTyping && typing);
    app.go({ ...FRESH, text: field.value || undefined }, { replace: typing });
    typing = stillTyping;
  }

  const asking = latestOnly();
  function offer(name) {
    examples.hidden = !name;
    if (!name) return;
    examples.replaceChildren(el("p", { class: "hint" }, "Loading examples…"));
    const failed = (error) => examples.replaceChildren(el("p", { class: "notice failed" }, inert(error.message)));
    asking(async (signal) => {
      const found = await ask(`/api/tasks/${encodeURIComponent(name)}/examples?count=${EXAMPLES}`, { signal });
      const close = button("✕", () => offer(tasks.field.value = ""), { class: "quiet", "aria-label": "Close the examples" });
      examples.replaceChildren(el("p", { class: "examples-head" }, el("b", {}, `Examples of ${name}`), close), el("ul", {}, ...found.map(example)));
    }, failed);
  }

  function example({ text, answer, wrong, counterfactual }) {
    const choose = () => {
      offer((tasks.field.value = ""));
      typing = false;
      app.go({ ...FRESH, text, answer, wrong: wrong ?? undefined, second: counterfactual ?? undefined, answer2: undefined, wrong2: undefined });
      field.focus();
    };
    return el("li", {}, button([el("bdi", {}, inert(text)), " ", el("span", { class: "hint" }, `answer ${tokenExact(answer)}`)], choose, { class: "row" }));
  }

  function update(state) {
    if (!pending && field.value !== (state.text ?? "")) field.value = state.text ?? "";
    model.field.value = String(state.model);
    place.classList.toggle("without", !state.text);
    if (!state.text) {
      tokens.replaceChildren();
      answers.replaceChildren();
    }
  }

  function show(recording) {
    said.clear();
    tokens.replaceChildren(...recording.tokens.map((text, i) => el("li", { title: `${i}: ${tokenExact(text)} (id ${recording.token_ids[i]})` }, el("bdi", {}, shorten(tokenLabel(text), 24)))));
    answers.replaceChildren(el("h2", {}, `Next token, ${plural(recording.tokens.length, "token")} read`), answerList(recording.answers));
  }

  /** Likely answers; each can be made what is explained. */
  function answerList(list) {
    const rows = list.slice(0, 6).map(({ token, probability }) => {
      const ask = button(el("bdi", {}, tokenExact(token)), () => app.go({ view: "circuit", answer: token, wrong: list.find((other) => other.token !== token)?.token, traced: undefined, look: undefined }), { class: "row", title: "Explain this answer: its circuit" });
      return el("li", {}, ask, bar(probability), el("span", { class: "weight" }, percent(probability)));
    });
    return el("ol", { class: "answer-list" }, ...rows);
  }

  return { place, said, update, show };
}
