// The prompt: a strip of its tokens, each underlined by what exchanging it costs; a click exchanges a word.

import { el } from "../page/dom.js";
import { direction, inert, number, percent, plural, shorten, signed, tokenExact, tokenLabel } from "../page/text.js";
import { promptOf } from "./library.js";
import { button, notice, select } from "./pieces.js";
import { ask, latestOnly } from "./server.js";

const EXAMPLES = 8;
const AT_ONCE = 80; // tokens that are laid out in one go

/** What a new prompt leaves behind: all that was about the old one's tokens. */
export const FRESH = { head: undefined, cell: undefined, answer: undefined, wrong: undefined, alone: undefined, traced: undefined, changes: [], swap: undefined, generate: undefined, show: undefined, look: undefined };

export function createPrompt(app) {
  const field = el("textarea", { id: "text", rows: 2, dir: "auto", spellcheck: "false", autocomplete: "off", placeholder: "Type a prompt, for example: When Mary and John went to the store, John gave a drink to" });
  const said = notice({ ofPrompt: true });
  const tokens = el("ol", { class: "tokens", "aria-label": "Tokens" });
  const exchange = el("div", { class: "exchange", role: "group", "aria-label": "Exchange a word", hidden: true });
  const examples = el("div", { class: "task-examples", hidden: true });
  const tasks = select("", [["", "Examples…"], ...app.server.tasks.map(({ name, description }) => [name, `${name}: ${shorten(inert(description), 60)}`])], "", offer);
  tasks.field.setAttribute("aria-label", "Examples of a task");
  const models = app.server.models.map(({ name }, i) => [String(i), shorten(inert(name), 40)]);
  const model = select("Model", models, "0", (value) => app.go({ ...FRESH, model: Number(value) }));
  model.group.hidden = models.length < 2;
  const write = button("New prompt", () => edit(true), { id: "write" });
  const look = button("Look", send, { class: "main" });
  const back = button("Cancel", () => edit(false), {});
  const hint = el("span", { class: "hint" }, `up to ${app.server.max_tokens} tokens · Enter looks, Shift+Enter breaks the line`);
  const writing = el("div", { class: "writing" }, el("label", { class: "unseen", for: "text" }, "Prompt"), field, el("div", { class: "prompt-line" }, look, back, hint));
  const says = el("p", { class: "says" });
  const strip = el("div", { class: "strip" }, tokens, says);
  const place = el("section", { class: "prompt-panel", "aria-label": "Prompt" }, el("div", { class: "prompt-row" }, strip, writing, el("div", { class: "prompt-line" }, write, tasks.group, model.group)), exchange, examples, said.place);
  let [editing, shown, words, weight] = [false, null, [], null];
  let asked = null; // the prompt whose tokens are shown
  let last; // the text of the state that was shown last

  field.addEventListener("input", () => ((editing = true), app.fade()));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && app.state.text) return edit(false);
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });

  // A long prompt shows its end, where the answer is, until the reader scrolls up; another width then changes nothing.
  let [atEnd, top] = [true, 0];
  const end = () => (tokens.scrollTop = tokens.scrollHeight);
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = tokens;
    tokens.classList.toggle("above", scrollTop > 0);
    atEnd = scrollHeight - clientHeight - scrollTop < 1 || (atEnd && scrollTop >= top);
    top = scrollTop;
  };
  tokens.addEventListener("scroll", scrolled, { passive: true });
  new ResizeObserver(() => atEnd && end()).observe(tokens);

  /** Write a prompt, or see the tokens of the one there is. */
  function edit(now) {
    editing = now;
    writing.hidden = !editing && Boolean(app.state.text);
    strip.hidden = write.hidden = !writing.hidden;
    back.hidden = !app.state.text;
    exchange.hidden = true;
    if (now) {
      field.value = app.state.text ?? "";
      field.focus();
      field.select();
    }
    app.fade();
  }

  function send() {
    const text = field.value || undefined;
    if (text === app.state.text) return edit(false);
    editing = false;
    app.go({ ...FRESH, text });
  }

  const asking = latestOnly();
  function offer(name) {
    examples.hidden = !name;
    if (!name) return;
    examples.replaceChildren(el("p", { class: "hint" }, "Loading examples…"));
    const failed = (error) => examples.replaceChildren(el("p", { class: "notice failed" }, inert(error.message)));
    asking(async (signal) => {
      const found = await ask(`/api/tasks/${encodeURIComponent(name)}/examples?count=${EXAMPLES}`, { signal });
      const close = button("✕", () => offer((tasks.field.value = "")), { class: "quiet", "aria-label": "Close the examples" });
      examples.replaceChildren(el("p", { class: "examples-head" }, el("b", {}, `Examples of ${name}`), close), el("ul", {}, ...found.map(example)));
    }, failed);
  }

  function example({ text, answer, wrong, counterfactual }) {
    const choose = () => {
      offer((tasks.field.value = ""));
      app.go({ ...FRESH, text, answer, wrong: wrong ?? undefined, second: counterfactual ?? undefined, answer2: undefined, wrong2: undefined });
    };
    return el("li", {}, button([el("bdi", {}, inert(text)), " ", el("span", { class: "hint" }, `answer ${tokenExact(answer)}`)], choose, { class: "row" }));
  }

  function update(state) {
    model.field.value = String(state.model);
    if (state.text !== last) editing = false;
    last = state.text;
    if (!editing) edit(false);
    if (!state.text) tokens.replaceChildren(), says.replaceChildren(), (shown = null);
    if (!editing) field.value = state.text ?? "";
  }

  function show(recording) {
    said.clear();
    if (shown?.id === recording.id) return void (asked = JSON.stringify(promptOf(app.state)));
    [shown, asked] = [recording, JSON.stringify(promptOf(app.state))];
    [words, exchange.hidden] = [[], true];
    if (weight?.[0].id !== recording.id) weight = null;
    strip.dir = direction(recording.tokens.join(""));
    answer(recording);
    tokens.replaceChildren();
    lay(recording, 0);
  }

  /** Lay out the tokens, some at a time: a long prompt must not stop the page. */
  function lay(recording, from) {
    if (shown !== recording) return;
    const spaced = recording.tokens.some((text) => text.startsWith(" "));
    const some = recording.tokens.slice(from, from + AT_ONCE).map((text, place) => {
      const i = from + place;
      const title = `${i}: ${tokenExact(text)} (id ${recording.token_ids[i]})`;
      const joined = spaced && i > 0 && !text.startsWith(" "); // a piece of a word, or a comma: it stands close to what is before it
      return el("li", joined ? { class: "joined" } : {}, button(el("bdi", {}, shorten(tokenLabel(text), 24)), () => exchangeAt(i), { class: "strip-token", title, "data-position": i }));
    });
    tokens.append(...some);
    if (from === 0) atEnd = true;
    if (atEnd) end();
    if (from + AT_ONCE < recording.tokens.length) setTimeout(() => lay(recording, from + AT_ONCE));
    else if (weight) weigh(...weight);
  }

  /** What the model says next, at the end of the strip: the prompt with its answer is a sentence. */
  function answer({ answers: [first] }) {
    says.replaceChildren(...(first ? [el("b", {}, el("bdi", {}, shorten(tokenLabel(first.token), 24))), ` ${percent(first.probability)}`] : []));
  }

  /** Underline every token by its importance: what is lost where its word is exchanged. */
  function weigh(recording, found) {
    weight = [recording, found];
    if (shown?.id !== recording.id || tokens.children.length < recording.tokens.length) return;
    words = found.words;
    const most = Math.max(...found.importance.map((value) => Math.abs(value ?? 0)), 1e-9);
    [...tokens.children].forEach((item, i) => {
      const value = found.importance[i];
      item.classList.toggle("weighed", value !== null);
      item.classList.toggle("against", value !== null && value < 0);
      item.style.setProperty("--share", value === null ? 0 : Math.abs(value) / most);
      if (value !== null) item.firstChild.title = `${i}: ${tokenExact(recording.tokens[i])}: exchanging it costs ${number(value)} of the ${found.measure} (mean)`;
    });
  }

  function exchangeAt(position) {
    const word = words.find(({ positions }) => positions.includes(position)) ?? { text: shown.tokens[position].trim(), positions: [position], changes: [] };
    const input = el("input", { type: "text", class: "answer", dir: "auto", value: word.text, "aria-label": `Another word for ${word.text}`, onkeydown: ({ key }) => (key === "Enter" ? replaceBy(input.value) : key === "Escape" && (exchange.hidden = true)) });
    const replaceBy = (text) => {
      const span = spanOf(word.positions);
      if (!span || text === word.text) return (exchange.hidden = true);
      const now = app.state.text;
      app.go({ ...FRESH, text: now.slice(0, span[0]) + text + now.slice(span[1]) });
    };
    const offered = word.changes.map((change) => button([el("bdi", {}, inert(change.after)), el("span", { class: "hint" }, ` ${signed(-change.effect)}${change.flips ? ", flips it" : ""}`)], () => app.go({ ...FRESH, text: change.text }), { class: "suggestion" }));
    const cost = word.mean === undefined ? [] : [el("span", { class: "hint" }, `${plural(word.changes.length, "replacement")} tried first, with what the answer then gains or loses`)];
    exchange.replaceChildren("Exchange ", el("bdi", { class: "token" }, tokenExact(word.text)), " for ", input, button("Exchange", () => replaceBy(input.value)), ...offered, ...cost, button("✕", () => (exchange.hidden = true), { class: "quiet", "aria-label": "Keep the word" }));
    exchange.hidden = false;
    input.select();
    input.focus();
  }

  /** Where a word stands in the text: its tokens are looked for one after the other. */
  function spanOf(positions) {
    const text = app.state.text;
    let [at, start] = [0, null];
    for (let i = 0; i <= positions[positions.length - 1]; i++) {
      const core = shown.tokens[i].trim();
      const found = core ? text.indexOf(core, at) : -1;
      if (found < 0) {
        if (positions.includes(i)) return null;
        continue;
      }
      if (i === positions[0]) start = found;
      at = found + core.length;
    }
    return start === null ? null : [start, at];
  }

  /** Whether something is written that is not shown yet. */
  const written = () => !writing.hidden && field.value !== (app.state.text ?? "");

  /** Whether the tokens are those of an earlier prompt: the new one's are awaited. */
  const outdated = () => shown !== null && asked !== JSON.stringify(promptOf(app.state));

  return { place, strip, said, update, show, weigh, written, outdated };
}
