// Puts the explorer together: one state, kept in the address; every view shows what it says.

import { createAddress, fragmentOf } from "../page/address.js";
import { el } from "../page/dom.js";
import { hideCard, placeCard } from "../page/interaction.js";
import { inert, shorten } from "../page/text.js";
import { createTheme } from "../page/theme.js";
import { createView } from "../page/view.js";
import { toState, toValues } from "./address.js";
import { createBeside } from "./beside.js";
import { createChanges, withChange } from "./changes.js";
import { createCircuit } from "./circuit.js";
import { createExplain } from "./explain.js";
import { createHeads } from "./heads.js";
import { createLibrary, meantBy, promptOf } from "./library.js";
import { menu } from "./pieces.js";
import { createPrompt } from "./prompt.js";
import { createQuestion } from "./question.js";
import { createRun } from "./run.js";
import { ask, latestOnly, onWaiting, watch } from "./server.js";
import { createShare, saveDrawing } from "./share.js";

async function start() {
  const waiting = el("p", { class: "waiting", role: "status", hidden: true });
  onWaiting((words) => {
    waiting.hidden = !words;
    waiting.textContent = words ? inert(words) : "";
  });
  const theme = el("button", { type: "button", id: "theme", class: "icon" });
  const brand = el("h1", { class: "brand" }, "headtrace");
  const nav = el("nav", { "aria-label": "Views" });
  const bar = el("header", { class: "bar" }, brand, nav, theme);
  document.body.append(bar, waiting);

  let server = null;
  try {
    server = await ask("/api/server");
  } catch (error) {
    return document.body.append(el("p", { class: "notice failed" }, inert(error.message)));
  }
  const app = createApp(server);
  build(app, { bar, nav, theme, waiting });
  createTheme(() => app.recoloured());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.recoloured());
  watch();
  app.render();
}

/** What the views have in common: the state, what was computed, the one view of circuits. */
function createApp(server) {
  const app = { server, library: createLibrary(server.models) };
  const address = createAddress((values) => {
    app.state = toState(values);
    app.restoring = true;
    app.render();
    app.restoring = false;
  });
  app.state = toState(address.read());

  /** Change the state: a new step of the history, or (`replace`) the same one. */
  app.go = (patch, { replace = false } = {}) => {
    app.remember(patch, !replace);
    app.render();
  };
  /** Change the state without showing it anew: it is on the screen already. */
  app.remember = (patch, step = false) => {
    app.state = { ...app.state, ...patch };
    address.write(toValues(app.state), step);
  };
  app.link = (patch) => `#${fragmentOf(toValues({ ...app.state, ...patch }))}`;
  app.change = (change) => app.go({ changes: withChange(app.state.changes, change) });
  app.recording = async (signal) => {
    try {
      return await app.library.record(promptOf(app.state), signal);
    } catch (error) {
      throw Object.assign(error, { ofPrompt: true });
    }
  };
  /** What is asked: the answer (tokens) and its rival, or null where only the likelihood counts; what the state leaves
   * open is chosen by the server, as `headtrace.why` does. */
  app.asked = async (signal) => {
    const { state } = app;
    const recording = await app.recording(signal);
    const body = state.answer ? { answer: meantBy(state.answer, recording), wrong: state.wrong && meantBy(state.wrong, recording), alone: Boolean(state.alone) } : {};
    return app.library.question(recording, body, signal);
  };
  /** The same as a part of a request. */
  app.root = async (signal) => {
    const { answer, wrong } = await app.asked(signal);
    const ids = answer.length === 1 ? answer[0].id : app.state.answer;
    return wrong ? { answer: ids, wrong: wrong.id } : { answer: ids };
  };
  /** What matters in a prompt, once it is known: its words, and its heads. */
  let known = null;
  app.matters = (recording, view) => {
    known = { id: recording.id, view };
    app.weighed(recording, view);
  };
  app.words = ({ id }) => (known?.id === id ? known.view.words : []);
  app.mattering = ({ id }) => new Set(known?.id === id ? known.view.heads.map(({ layer, head }) => `${layer} ${head}`) : []);
  app.changed = async (signal) => {
    const { state } = app;
    const recording = await app.recording(signal);
    const body = { interventions: state.changes, ...(await app.root(signal)), generate: state.generate ?? 0 };
    return app.library.intervene(recording, body, signal);
  };
  app.card = (content, what) => (content ? placeCard(content, what) : hideCard());
  return app;
}

function build(app, { bar, nav, theme, waiting }) {
  const prompt = createPrompt(app);
  const question = createQuestion(app);
  const views = { explain: createExplain(app), heads: createHeads(app), circuit: createCircuit(app), beside: createBeside(app) };
  if (app.server.run) views.run = createRun(app);
  const changes = createChanges(app);
  const help = el("div", { class: "help-words" });
  const helpPlace = menu("help", "What am I looking at?", "", help);
  const share = createShare(app);
  const container = el("div", { class: "circuit-view" });
  const remember = (step) => container.checkVisibility() && app.remember({ look: fragmentOf(circuits.tell()) || undefined }, step);
  const circuits = createView(container, { frame: { level: "h2" }, remember, extra: (...given) => views.circuit.extra(...given) });
  const note = el("p", { class: "stale-note", role: "status", hidden: true }, "What is shown here still answers the previous question.");
  const main = el("main", {}, note, ...Object.values(views).map(({ place }) => place));
  for (const each of [helpPlace, share.place, el("p", { class: "served" }, app.server.models.map(({ name }) => inert(name)).join(" and "))]) bar.insertBefore(each, theme);
  prompt.place.append(question.place);
  waiting.after(prompt.place, main);
  /** Fade the results of an earlier prompt or question, and say so: while one types, and until the new ones are there. */
  app.fade = () => {
    const old = Boolean(app.view().results) && (prompt.written() || app.view().outdated());
    app.view().results?.forEach((each) => each.classList.toggle("stale", old));
    prompt.strip.classList.toggle("stale", prompt.outdated());
    prompt.strip.inert = prompt.outdated(); // a click on an old word would exchange it in the new text
    question.place.classList.toggle("stale", question.outdated());
    note.hidden = !old;
  };
  app.weighed = prompt.weigh;
  app.written = prompt.written;
  const loading = latestOnly();

  const currentName = () => (Object.hasOwn(views, app.state.view) ? app.state.view : "explain");
  app.view = () => views[currentName()];
  app.python = () => app.view().outdated?.() ? null : (changes.place.hidden ? null : changes.python()) ?? app.view().python();
  app.shareable = () => share.update();

  /** Show circuits in a place of a view: there is one drawing, which goes where it is looked at. */
  app.showCircuits = (host, graphs, options) => {
    if (container.parentElement !== host) host.append(container);
    const values = Object.fromEntries(new URLSearchParams(app.state.look ?? ""));
    const same = circuits.shown.length === graphs.length && graphs.every((graph, i) => graph === circuits.shown[i]);
    if (!same) circuits.show(graphs, { ...options, values: options?.growing ? null : values });
    else if (app.restoring) circuits.restore(values);
  };
  app.drawing = () => {
    const drawn = app.view().svg?.();
    if (drawn) return (kind) => saveDrawing(drawn, app.view().name(app.state), kind);
    if (!container.isConnected || !container.checkVisibility() || !circuits.charts.length) return null;
    return (kind) => container.querySelector(`#save-${kind}`).click();
  };
  app.recoloured = () => Object.values(views).forEach((view) => view.recoloured?.());

  app.render = () => {
    const { state } = app;
    hideCard();
    const current = currentName();
    nav.replaceChildren(...Object.keys(views).map((name) => el("a", { href: app.link({ view: name, look: name === current ? state.look : undefined }), "aria-current": name === current ? "page" : null, "data-view": name }, views[name].title)));
    prompt.place.hidden = current === "run" || current === "beside";
    prompt.update(state);
    if (state.text) loading(async (signal) => {
      const recording = await recorded(signal);
      prompt.show(recording);
      app.fade();
      question.show(recording, await app.asked(signal));
      app.fade();
    }, prompt.said.failed);
    else loading.stop(), question.hide();
    for (const [name, view] of Object.entries(views)) view.place.hidden = name !== current;
    help.replaceChildren(...views[current].help.map((text) => el("p", {}, text)));
    views[current].changesSlot?.append(changes.place);
    changes.update(state);
    views[current].update(state);
    share.update();
    app.fade();
    document.documentElement.dataset.view = current;
    document.title = `${state.text ? `${shorten(inert(state.text), 60)} - ` : ""}headtrace explorer`;
  };

  async function recorded(signal) {
    prompt.said.busy("Reading the prompt…");
    return app.recording(signal);
  }
}

start();
