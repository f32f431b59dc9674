// The circuit behind an answer, in the page's own drawing, growing while it is traced.

import { el } from "../page/dom.js";
import { componentChange, factorButtons, named, signalChange } from "./changes.js";
import { promptOf } from "./library.js";
import { button, choice, notice } from "./pieces.js";
import { latestOnly } from "./server.js";
import { traced } from "./tracing.js";

/** What the view shows, in plain words. */
const HELP = [
  "A circuit answers: why this answer? It begins with the answer at the top and goes back to the tokens at the bottom. Boxes are heads and MLPs at a token, lines are what one of them wrote and another one read.",
  "“Attention” follows why heads attend where they do: blue lines made a query (what a token looks for), orange lines a key (what a token offers). “Complete” also follows what is moved, in green, with its share of the answer: the logit of the answer minus that of the wrong one, or the likelihood of the answer if you give no wrong one.",
  "Click a box or a line, then ×0, ×½ or ×2: the model is run again with that change, and its answers are shown beside those it gave before.",
];

export function createCircuit(app) {
  const said = notice();
  const paths = choice("trace-paths", "Paths to trace", [["attention", "attention"], ["complete", "complete"]], "complete", (value) => app.go({ paths: value, traced: undefined, look: undefined }));
  const start = button("Trace", () => begin(), { class: "main" });
  const cancel = button("Cancel", () => stop(), { hidden: true });
  const bar = el("progress", { max: 1, hidden: true, "aria-label": "Progress of the trace" });
  const form = el("div", { class: "controls ask", role: "group", "aria-label": "What is traced" }, el("span", { class: "group" }, "paths", paths.group), start, cancel, bar);
  const host = el("div", { class: "circuit-slot" });
  const changesSlot = el("div", { class: "changes-slot" });
  const swap = async () => {
    const { answer, wrong } = await app.asked();
    app.go({ answer: wrong.token, wrong: answer[0].token, alone: undefined, look: undefined });
  };
  const likely = async () => app.go({ answer: (await app.asked()).answer[0].token, wrong: undefined, alone: true, look: undefined });
  const ways = el(
    "div",
    { class: "ways buttons", hidden: true },
    "Nothing to draw here. ",
    button("Swap the answers", () => swap().catch(said.failed)),
    button("How likely is it?", () => likely().catch(said.failed)),
    button("Difference to changed prompts", () => app.go({ view: "explain" })),
  );
  const place = el("section", { class: "circuit", hidden: true }, form, said.place, ways, changesSlot, host);
  const tracing = latestOnly();
  let [key, found, running] = [null, null, false];

  function begin() {
    if (!app.state.text) return said.failed({ message: "Which prompt? Type one above." });
    key = null;
    app.go({ traced: true }, { replace: app.state.traced });
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
    paths.set(state.paths);
    if (!state.text) return leave();
    const wanted = JSON.stringify([promptOf(state), state.answer, state.wrong, state.alone, state.paths]);
    host.hidden = !found || key !== wanted;
    if (!state.traced) {
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

  function trace(state) {
    [found, running] = [null, true];
    start.hidden = ways.hidden = true;
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
      found = await traced(app.library, recording, { ...(await app.root(signal)), paths: state.paths }, { told, grown: grow, signal });
      settle();
      said.clear();
      host.hidden = false;
      ways.hidden = found.graph.data.edges.length > 0;
      app.showCircuits(host, [found.graph], { growing: grown });
      app.shareable();
    }, (error) => {
      settle();
      key = null;
      if (error.code === "no_job") return update(app.state); // the server was started anew meanwhile
      said.failed(error);
    });
  }

  function leave() {
    tracing.stop();
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

  /** The circuit, where it is shown: one of another question is not. */
  const current = () => (host.hidden ? null : found);

  return {
    title: "Circuit",
    help: HELP,
    place,
    changesSlot,
    update,
    extra,
    python: () => current()?.python,
    json: () => current()?.graph.data,
    job: () => current()?.job,
    results: [host],
    outdated: () => false, // a circuit of another question is not shown at all
    name: () => "circuit",
  };
}
