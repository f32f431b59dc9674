// The first view: why this answer? The mechanism as it is computed, beside the heads that matter and why they attend.

import { el } from "../page/dom.js";
import { createMechanism } from "../page/mechanism.js";
import { inert } from "../page/text.js";
import { createHeadList } from "./headlist.js";
import { promptOf } from "./library.js";
import { button, notice } from "./pieces.js";
import { follow, latestOnly } from "./server.js";
import { createStarters } from "./starters.js";
import { createWhy } from "./why.js";

/** What the view shows, in plain words. */
const HELP = [
  "The model reads the prompt and says what comes next. Here is why it says this rather than that: what in the prompt matters (the line under each word: how much is lost when the word is exchanged for others), which attention heads matter, and what they do together.",
  "The mechanism is drawn from the words at the bottom to the answer at the top. Its numbers compare the prompt with changed ones that get another answer: each is the part of the difference that flows through a step. A step's badge is measured: what the model says with the step's heads removed, beside as many random heads.",
  "Click a head to see why it attends there, and to change it in the running model.",
];

const NARROW = 860; // pixels of a window where everything stands below each other

export function createExplain(app) {
  const said = notice();
  const bar = el("progress", { max: 1, hidden: true, "aria-label": "Progress" });
  const cancel = button("Cancel", stop, { hidden: true });
  const again = button("Explain it", () => ((key = null), update(app.state)), { class: "main", hidden: true });
  const status = el("div", { class: "controls explain-status" }, said.place, bar, cancel, again);
  const slot = el("div", { class: "mechanism-slot" });
  const left = el("div", { class: "explain-left" }, status, slot);
  const heads = createHeadList(app);
  const why = createWhy(app);
  const back = button("← Heads that matter", () => app.go({ head: undefined, cell: undefined }), { class: "link back" });
  const drawer = el("div", { class: "drawer", hidden: true }, back, why.place);
  const changesSlot = el("div", { class: "changes-slot" });
  const right = el("div", { class: "explain-right" }, changesSlot, heads.place, drawer);
  const starters = createStarters(app);
  const body = el("div", { class: "explain-body" }, left, right);
  const place = el("section", { class: "explain", hidden: true }, body, starters.place);
  const running = latestOnly();
  let [key, found, job, drawn] = [null, null, null, null];
  let answered = null; // the question that the drawing answers

  function update(state) {
    starters.update().then((any) => {
      if (!any && !app.state.text) said.busy("Type a prompt above.");
    }, said.failed);
    const closed = drawer.hidden;
    drawer.hidden = !state.head || !state.cell;
    heads.place.hidden = !drawer.hidden;
    why.update(state);
    heads.update(state);
    if (closed && !drawer.hidden && place.clientWidth < NARROW) right.scrollIntoView({ block: "start" });
    if (!state.text) return running.stop(), settle(), (key = null), skeleton();
    const wanted = JSON.stringify([promptOf(state), state.answer, state.wrong, state.alone]);
    if (wanted !== key) begin(wanted, state);
  }

  function begin(wanted, state) {
    key = wanted;
    [cancel.hidden, again.hidden, bar.hidden] = [false, true, false];
    bar.removeAttribute("value");
    said.clear(); // that the prompt is read is said at the prompt
    if (!found) skeleton();
    app.fade();
    running(async (signal) => {
      const recording = await app.recording(signal);
      const { answer, wrong } = await app.asked(signal);
      said.busy("Exchanging words, to see what matters…");
      const root = { answer: answer.length === 1 ? answer[0].id : state.answer, wrong: wrong?.id, alone: !wrong };
      if (found?.recording.id !== recording.id) [found, drawn] = [null, null], heads.clear(), skeleton();
      const posted = await app.library.post(recording, "mechanism", root, signal);
      job = posted.id;
      const view = await follow(posted, (name, data) => heard(name, data, recording), signal);
      settle();
      said.clear();
      show(view, recording);
      app.shareable();
    }, (error) => {
      settle();
      slot.replaceChildren();
      if (answered !== key) (found = null), heads.clear(); // they are of another question
      answered = key;
      app.fade();
      said.failed(error);
      if (error.code === "no_job") return again.click(); // the server was started anew meanwhile
      if (!error.ofPrompt) slot.replaceChildren(ways());
      again.hidden = error.code !== "cancelled";
    });
  }

  function heard(name, data, recording) {
    if (name === "queued") said.busy(data.ahead ? `Waiting: ${data.ahead} before this one.` : "Exchanging words, to see what matters…");
    else if (name === "partial") {
      show(data, recording);
      said.busy(data.stage === "run" ? "Exchanging words, to see what matters…" : data.stage === "heads" ? "Naming what they do…" : removing(data.mechanism));
    } else if (data.of) bar.value = data.done / data.of;
  }

  function removing({ steps }) {
    const measured = steps.filter((step) => step.measured).length;
    return `Removing each step in the model, to see whether it counts: ${measured} of ${steps.length}…`;
  }

  function settle() {
    [cancel.hidden, bar.hidden] = [true, true];
  }

  function stop() {
    running.stop();
    settle();
    if (!drawn) slot.replaceChildren();
    said.busy("Cancelled.");
    again.hidden = false;
  }

  /** Show what there is of an answer. */
  function show(view, recording) {
    // A drawing that only gains badges keeps what was chosen in it.
    const before = found?.view.stage === "cards" && drawn ? { step: Number(drawn.dataset.chosen || NaN), focused: drawn.contains(document.activeElement) } : null;
    found = { view, recording };
    answered = key;
    app.fade();
    if (view.stage !== "run") app.matters(recording, view);
    heads.show(view, recording);
    why.refresh();
    if (view.mechanism) {
      drawn = createMechanism(view.mechanism, before?.step);
      drawn.classList.toggle("measuring", view.stage === "cards");
      drawn.addEventListener("click", (event) => light(event.target.closest("[data-step]")?.dataset.step));
      slot.replaceChildren(drawn);
      if (before?.focused) drawn.focus({ preventScroll: true });
    } else if (view.stage === "run") skeleton(); // what is drawn is the answer to another question
    else if (view.stage === "badges") slot.replaceChildren(el("p", { class: "sentence" }, inert(view.reason ?? "No head carries enough of it to be named.")), ways());
    place.dataset.stage = view.stage;
  }

  /** The heads of a step stand out in the list. */
  function light(step) {
    for (const row of heads.place.querySelectorAll(".head-row")) row.classList.toggle("of-step", step !== undefined && row.dataset.step === step);
  }

  /** Where nothing was found: what else can be asked. */
  function ways() {
    const { state } = app;
    const swap = async () => {
      const { answer, wrong } = await app.asked();
      app.go({ answer: wrong.token, wrong: answer[0].token, alone: undefined });
    };
    const likely = async () => app.go({ answer: (await app.asked()).answer[0].token, wrong: undefined, alone: true });
    return el(
      "div",
      { class: "ways buttons" },
      state.alone ? button("Rather than its rival", () => app.go({ alone: undefined })) : button("Swap the answers", () => swap().catch(said.failed)),
      state.alone ? null : button("How likely is it?", () => likely().catch(said.failed)),
      button("Circuit of this run alone", () => app.go({ view: "circuit", traced: true })),
    );
  }

  function skeleton() {
    [place.dataset.stage, drawn] = ["none", null];
    slot.replaceChildren(el("div", { class: "skeletons", "aria-hidden": "true" }, ...Array.from({ length: 5 }, () => el("div", { class: "skeleton" }))));
  }

  return {
    title: "Explain",
    help: HELP,
    place,
    changesSlot,
    update,
    results: [slot, right],
    outdated: () => found !== null && answered !== key,
    recoloured: heads.recoloured,
    python: () => why.python() ?? found?.view.python,
    json: () => why.data() ?? found?.view,
    job: () => (why.data() ? null : found?.view.stage === "badges" ? job : null),
    svg: () => slot.querySelector(".mechanism-drawing svg"),
    name: () => "mechanism",
  };
}
