// Two prompts, or one prompt in two models, side by side: what their circuits share.

import { el } from "../page/dom.js";
import { inert, shorten } from "../page/text.js";
import { meantBy, promptOf } from "./library.js";
import { button, choice, meant, notice, select, shown } from "./pieces.js";
import { latestOnly } from "./server.js";
import { traced } from "./tracing.js";

/** Fields for an answer and a wrong one, with what the model finds likely to choose from. */
function answerFields(name, changed, entered) {
  const list = el("datalist", { id: `${name}-likely` });
  const field = (label, which, hint) => {
    const input = el("input", { type: "text", class: "answer", dir: "auto", list: list.id, spellcheck: "false", autocomplete: "off", placeholder: hint, onchange: () => changed(which, meant(input.value)), onkeydown: ({ key }) => key === "Enter" && entered() });
    return [el("label", { class: "group" }, label, " ", input), input];
  };
  const [answerGroup, answer] = field("Why", "answer", "answer");
  const [wrongGroup, wrong] = field("rather than", "wrong", "nothing: how likely");
  return {
    groups: [answerGroup, wrongGroup, list],
    read: () => ({ answer: meant(answer.value), wrong: meant(wrong.value) }),
    set(state) {
      if (document.activeElement !== answer) answer.value = shown(state.answer);
      if (document.activeElement !== wrong) wrong.value = shown(state.wrong);
    },
    offer: (answers) => list.replaceChildren(...answers.map(({ token }) => el("option", { value: shown(token) }))),
  };
}

/** What is explained: an answer rather than a wrong one, or how likely an answer is. */
const rootOf = ({ answer, wrong }, recording) => ({ answer: meantBy(answer, recording), ...(wrong ? { wrong: meantBy(wrong, recording) } : {}) });

/** What the view shows, in plain words. */
const HELP = [
  "Two circuits side by side: of two prompts, or of one prompt in two models. Lines in grey are in both; lines in colour are only in that one. If the prompts are the same, they are matched by component and position, otherwise by component alone.",
  "A good second prompt differs from the first in one thing: the names swapped, or one word replaced. What changes in the circuit is then about that thing.",
];

export function createBeside(app) {
  const said = notice();
  const models = app.server.models.map(({ name }, i) => [String(i), shorten(inert(name), 40)]);
  const first = side("A", (patch) => app.go({ ...patch, traced: undefined, look: undefined }));
  const rename = ({ text, answer, wrong, model }) => ({ second: text, answer2: answer, wrong2: wrong, model2: model });
  const second = side("B", (patch) => app.go({ ...defined(rename(patch), patch), traced: undefined, look: undefined }));
  const paths = choice("beside-paths", "Paths to trace", [["attention", "attention"], ["complete", "complete"]], "complete", (value) => app.go({ paths: value, traced: undefined, look: undefined }));
  const start = button("Trace both", begin, { class: "main" });
  const cancel = button("Cancel", stop, { hidden: true });
  const line = el("div", { class: "controls" }, el("span", { class: "group" }, "paths", paths.group), start, cancel);
  const host = el("div", { class: "circuit-slot" });
  const place = el("section", { class: "beside", hidden: true }, el("div", { class: "two" }, first.place, second.place), line, said.place, host);
  const tracing = latestOnly();
  let [key, found, running] = [null, null, false];

  /** Only the fields that a patch is about. */
  function defined(renamed, patch) {
    const names = { second: "text", answer2: "answer", wrong2: "wrong", model2: "model" };
    return Object.fromEntries(Object.entries(renamed).filter(([name]) => names[name] in patch));
  }

  function side(name, changed) {
    const text = el("textarea", { rows: 2, dir: "auto", spellcheck: "false", "aria-label": `Prompt ${name}`, onchange: () => changed({ text: text.value || undefined }) });
    const fields = answerFields(`beside-${name}`, (which, value) => changed({ [which]: value || undefined }), () => begin());
    const model = select("Model", models, "0", (value) => changed({ model: Number(value) }));
    model.group.hidden = models.length < 2;
    const made = el("div", { class: "side" }, el("h2", {}, `Prompt ${name}`), text, el("div", { class: "controls" }, ...fields.groups, model.group));
    const set = (state) => {
      if (document.activeElement !== text) text.value = state.text ?? "";
      fields.set(state);
      model.field.value = String(state.model ?? 0);
    };
    return { place: made, set, offer: fields.offer, read: () => ({ text: text.value, ...fields.read(), model: Number(model.field.value) }) };
  }

  /** The second side: where nothing is said of it, as the first. */
  function secondOf(state) {
    const model = state.model2 ?? (models.length > 1 && !state.second ? 1 : state.model);
    return { text: state.second ?? state.text, answer: state.answer2 ?? state.answer, wrong: state.wrong2 ?? state.wrong, model };
  }

  function begin() {
    const [a, b] = [first.read(), second.read()];
    if (!a.text || !b.text || !a.answer || !b.answer) return said.failed({ message: "Both sides need a prompt and an answer." });
    key = null;
    app.go({ text: a.text, answer: a.answer, wrong: a.wrong || undefined, model: a.model, ...rename({ ...b, wrong: b.wrong || undefined }), traced: true });
  }

  function stop() {
    tracing.stop();
    settle();
    said.busy("The trace was cancelled.");
    app.go({ traced: undefined, look: undefined }, { replace: true });
  }

  function settle() {
    running = false;
    cancel.hidden = true;
    start.hidden = false;
  }

  const suggesting = latestOnly();
  function update(state) {
    const other = secondOf(state);
    first.set(state);
    second.set(other);
    paths.set(state.paths);
    const wanted = JSON.stringify([state, other].map((asked) => [promptOf(asked), asked.answer, asked.wrong, state.paths]));
    host.hidden = !found || key !== wanted;
    if (state.text) suggesting((signal) => suggest(state, other, signal), said.failed);
    if (!state.traced || !state.answer || !state.text) {
      if (running) tracing.stop(), settle(), said.clear();
      return;
    }
    if (wanted !== key) {
      key = wanted;
      trace([state, other], state.paths);
    } else if (found && !running) app.showCircuits(host, found.map(({ graph }) => graph));
  }

  async function suggest(state, other, signal) {
    for (const [which, asked] of [[first, state], [second, other]]) {
      const { answers } = await app.library.record(promptOf(asked), signal);
      which.offer(answers);
      if (!asked.answer) which.set({ ...asked, answer: answers[0]?.token, wrong: answers[1]?.token });
    }
  }

  function trace(sides, along) {
    [found, running] = [null, true];
    start.hidden = true;
    cancel.hidden = false;
    said.busy("Asking for both circuits…");
    tracing(async (signal) => {
      const each = sides.map(async (asked, i) => {
        const told = (words) => said.busy(`${"AB"[i]}: ${words}`);
        const recording = await app.library.record(promptOf(asked), signal);
        return traced(app.library, recording, { ...rootOf(asked, recording), paths: along }, { told, grown: () => {}, signal });
      });
      found = await Promise.all(each);
      settle();
      said.clear();
      host.hidden = false;
      app.showCircuits(host, found.map(({ graph }) => graph));
      app.shareable();
    }, (error) => {
      settle();
      key = null;
      tracing.stop();
      said.failed(error);
    });
  }

  return {
    title: "Side by side",
    help: HELP,
    place,
    update,
    python: () => found?.map(({ python }) => python).join("\n\n"),
    json: () => found && { circuits: found.map(({ graph }) => graph.data) },
    job: () => null,
    name: () => "two-circuits",
  };
}
