// The circuit behind an answer, in the page's own drawing, growing while it is traced.

import { el } from "../page/dom.js";
import { componentChange, factorButtons, named, signalChange } from "./changes.js";
import { promptOf, rootOf } from "./library.js";
import { button, choice, meant, notice, shown } from "./pieces.js";
import { latestOnly } from "./server.js";
import { traced } from "./tracing.js";

/** Fields for an answer and a wrong one, with what the model finds likely to choose from. */
export function answerFields(name, changed, entered) {
  const list = el("datalist", { id: `${name}-likely` });
  const field = (label, which, hint) => {
    const input = el("input", { type: "text", class: "answer", list: list.id, spellcheck: "false", autocomplete: "off", placeholder: hint, onchange: () => changed(which, meant(input.value)), onkeydown: ({ key }) => key === "Enter" && entered() });
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

/** What the view shows, in plain words. */
const HELP = [
  "A circuit answers: why this answer? It begins with the answer at the top and goes back to the tokens at the bottom. Boxes are heads and MLPs at a token, lines are what one of them wrote and another one read.",
  "“Attention” follows why heads attend where they do: blue lines made a query (what a token looks for), orange lines a key (what a token offers). “Complete” also follows what is moved, in green, with its share of the answer: the logit of the answer minus that of the wrong one, or the likelihood of the answer if you give no wrong one.",
  "Click a box or a line, then ×0, ×½ or ×2: the model is run again with that change, and its answers are shown beside those it gave before.",
];

export function createCircuit(app) {
  const said = notice();
  const fields = answerFields("circuit", (which, value) => app.go({ [which]: value || undefined, traced: undefined, look: undefined }), begin);
  const paths = choice("trace-paths", "Paths to trace", [["attention", "attention"], ["complete", "complete"]], "complete", (value) => app.go({ paths: value, traced: undefined, look: undefined }));
  const start = button("Trace", () => begin(), { class: "main" });
  const cancel = button("Cancel", () => stop(), { hidden: true });
  const bar = el("progress", { max: 1, hidden: true, "aria-label": "Progress of the trace" });
  const form = el("div", { class: "controls ask", role: "group", "aria-label": "What is explained" }, ...fields.groups, el("span", { class: "group" }, "paths", paths.group), start, cancel, bar);
  const host = el("div", { class: "circuit-slot" });
  const place = el("section", { class: "circuit", hidden: true }, form, said.place, host);
  const tracing = latestOnly();
  let [key, found, running] = [null, null, false];

  function begin() {
    const { answer, wrong } = fields.read();
    if (!app.state.text) return said.failed({ message: "Which prompt? Type one above." });
    if (!answer) return said.failed({ message: "Which answer is to be explained? Choose one of the list, or type a token." });
    key = null;
    app.go({ answer, wrong: wrong || undefined, traced: true }, { replace: app.state.traced && app.state.answer === answer });
    place.scrollIntoView({ block: "start" });
  }

  function stop() {
    tracing.stop();
    settle();
    said.busy("The trace was cancelled.");
    app.go({ traced: undefined, look: undefined }, { replace: true });
  }

  function settle() {
    running = false;
    cancel.hidden = bar.hidden = true;
    start.hidden = false;
  }

  function told(words, share) {
    said.busy(words);
    bar.hidden = false;
    if (share === null) bar.removeAttribute("value");
    else bar.value = share;
  }

  function update(state) {
    fields.set(state);
    paths.set(state.paths);
    if (!state.text) return leave();
    suggest(state);
    const wanted = JSON.stringify([promptOf(state), state.answer, state.wrong, state.paths]);
    host.hidden = !found || key !== wanted;
    if (!state.traced || !state.answer) {
      if (running) tracing.stop(), settle(), said.clear();
      return;
    }
    if (wanted === key) {
      if (found && !running) app.showCircuits(host, [found.graph]);
      return;
    }
    key = wanted;
    trace(state);
  }

  /** Where nothing is asked yet, the likeliest answer rather than the next one. */
  const suggesting = latestOnly();
  function suggest(state) {
    suggesting(async (signal) => {
      const { answers } = await app.recording(signal);
      fields.offer(answers);
      if (!state.answer && state.view === "circuit" && answers.length) fields.set({ answer: answers[0].token, wrong: answers[1]?.token });
    }, () => {});
  }

  function trace(state) {
    [found, running] = [null, true];
    start.hidden = true;
    cancel.hidden = false;
    told("Asking for the circuit…", null);
    let grown = false;
    tracing(async (signal) => {
      const grow = (graph) => {
        host.hidden = false;
        app.showCircuits(host, [graph], { growing: grown });
        grown = true;
      };
      const recording = await app.recording(signal);
      found = await traced(app.library, recording, { ...rootOf(state, recording), paths: state.paths }, { told, grown: grow, signal });
      settle();
      said.clear();
      host.hidden = false;
      app.showCircuits(host, [found.graph], { growing: grown });
      app.shareable();
    }, (error) => {
      settle();
      key = null;
      said.failed(error);
    });
  }

  function leave() {
    tracing.stop();
    suggesting.stop();
    settle();
    [key, found] = [null, null];
    said.clear();
    host.hidden = true;
  }

  /** In the panel of a component: change what it writes, or one of the signals it sends or receives. */
  function extra(chart, node, edge) {
    if (app.state.view !== "circuit" || node.kind === "root" || running) return [];
    const { graph } = chart;
    const signals = [...node.from, ...node.into].filter(({ side, channels }) => (side === "query" || side === "key") && channels?.length);
    const changeOf = (signal) => signalChange(graph.nodes.get(signal.source), graph.nodes.get(signal.target), signal.side, signal.channels);
    const options = [["", `all that ${node.name} writes`], ...signals.map((signal) => [String(signal.index), named(changeOf(signal))])];
    const field = el("select", { "aria-label": "What is changed" }, ...options.map(([value, label]) => el("option", { value }, label)));
    if (edge && signals.includes(edge)) field.value = String(edge.index);
    const buttons = el("div", { class: "try" });
    const offer = () => buttons.replaceChildren(factorButtons(app, field.value === "" ? componentChange(node) : changeOf(graph.edges[field.value])));
    field.addEventListener("change", offer);
    offer();
    const open = node.kind === "head" && node.src !== null ? button("Its attention, and why", () => app.go({ view: "heads", head: [node.layer, node.head], cell: [node.dest, node.src] }), { class: "link" }) : null;
    return [el("section", { class: "change-here" }, el("h3", {}, "Change it"), field, buttons, open)];
  }

  return {
    title: "Circuit",
    help: HELP,
    place,
    update,
    extra,
    python: () => found?.python,
    json: () => found?.graph.data,
    job: () => found?.job,
    name: () => "circuit",
  };
}
