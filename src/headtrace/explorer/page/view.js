// Circuits in a container, one or two beside each other: what is on the screen, and what happens when something is looked at.

import { createChart } from "./chart.js";
import { comparePanel, counterparts, markShared, unmark } from "./compare.js";
import { createControls, debounced, search } from "./controls.js";
import { effectLegend, emptyMessage, heading, nodePanel, overviewPanel } from "./details.js";
import { el } from "./dom.js";
import { savePng, saveSvg } from "./export.js";
import { createFrame } from "./frame.js";
import { mlpRuns } from "./fold.js";
import { foldGraph } from "./graph.js";
import { hideCard, makeInteractive } from "./interaction.js";
import { inert, plural, shorten } from "./text.js";

/** No run of MLPs is unfolded. */
const freshFolds = () => ({ all: false, open: new Set() });
const QUICK = 400; // components and edges
const SUBTITLE = 270; // letters: what a complete circuit has to say of its size, and a name

/**
 * A view of circuits. `frame` is what its frame takes (see frame.js). Hooks, all optional: drawing(busy) when it begins
 * and ends to draw, remember(step) when it shows something else (see tell; with `step`, something was pinned or let go),
 * extra(chart, node, edge) for what a page adds to the panel of a pinned component (edge: the one that was clicked).
 */
export function createView(container, { frame = {}, drawing = () => {}, remember = () => {}, extra = () => [] } = {}) {
  const part = createFrame(container, frame);
  const state = { given: [], among: [], shown: [], charts: [], withPositions: false, edge: null, panel: null, folds: freshFolds() };
  const controls = createControls(part, (filters) => redraw(filters));

  const app = {
    /** Pin a component, or let go; MLPs that are folded into one unfold. */
    press(chart, id, edge = null) {
      const node = chart.graph.nodes.get(id);
      if (node?.members) unfold(node);
      else app.pin(chart, id, edge);
    },
    pin(chart, id, edge = null) {
      for (const other of state.charts) if (other !== chart) other.pinned = null;
      const again = chart.pinned === id && state.edge === edge;
      chart.pinned = id !== null && again ? null : id;
      state.edge = chart.pinned === null ? null : edge;
      for (const other of state.charts) other.light(null);
      showCounterparts(chart, chart.pinned);
      showPanel();
      remember(true);
    },
    hover(chart, target) {
      chart.light(target);
      showCounterparts(chart, target?.node ?? chart.pinned);
    },
  };

  function showCounterparts(chart, id) {
    if (state.charts.length < 2) return;
    const other = state.charts[1 - state.charts.indexOf(chart)];
    const node = chart.graph.nodes.get(id);
    const alike = node ? counterparts(chart.graph, node, other.graph) : [];
    other.light(alike.length ? { node: alike[0] } : null);
  }

  /** Go to a node from a list: pin it where it is. */
  function choose(chart, id) {
    if (chart.pinned !== id) app.pin(chart, id);
    const place = chart.geometry.nodes.get(id);
    if (place) chart.viewport.reveal(place);
  }

  const pinned = () => state.charts.find((chart) => chart.pinned !== null);
  const pinName = (chart) => (chart ? `${state.charts.indexOf(chart) ? "B" : ""}${chart.pinned}` : null);

  function panelContent() {
    const chart = pinned();
    const [first, second] = state.charts;
    if (chart) {
      const node = chart.graph.nodes.get(chart.pinned);
      const [head, kind, ...rest] = nodePanel(chart.graph, node, (id) => choose(chart, id), () => app.pin(chart, null));
      const more = node.members ? [] : extra(chart, node, state.edge === null ? null : chart.graph.edges[state.edge]);
      return [head, kind, foldButton(chart, node), ...more, ...rest].filter(Boolean);
    }
    if (!second) return overviewPanel(first.graph, (id) => choose(first, id));
    return comparePanel(first.graph, second.graph, state.withPositions, (which, id) => choose(state.charts[which], id));
  }

  // MLPs of one token are one element each, until somebody looks closer.

  /** Which run of MLPs a component is a member of: of those that are open. */
  function openRun(chart, node) {
    const runs = node.kind === "mlp" && !node.members ? mlpRuns((chart.graph.unfolded ?? chart.graph).data) : [];
    return runs.find(({ key, members }) => (state.folds.all || state.folds.open.has(key)) && members.some(({ id }) => id === node.id));
  }

  function foldButton(chart, node) {
    if (state.charts.length > 1) return null;
    const run = openRun(chart, node);
    if (!node.members && !run) return null;
    const [first, last] = node.members ? [node.members.first, node.members.last] : [run.members[0].layer, run.members.at(-1).layer];
    const fold = () => refold(() => foldAgain(run));
    return el("p", { class: "fold" }, el("button", { type: "button", onclick: () => (run ? fold() : unfold(node)) }, `${run ? "Fold" : "Unfold"} MLPs ${first}-${last}`));
  }

  function foldAgain(run) {
    if (state.folds.all) {
      const [chart] = state.charts;
      state.folds = { all: false, open: new Set(mlpRuns((chart.graph.unfolded ?? chart.graph).data).map(({ key }) => key)) };
    }
    state.folds.open.delete(run.key);
  }

  /** Show the members of an element, and pin the one with most influence. */
  function unfold({ members }) {
    refold(() => state.folds.open.add(members.key));
    const [chart] = state.charts;
    const own = members.ids.map((id) => chart.graph.nodes.get(id));
    const strongest = own.reduce((best, node) => ((node.influence ?? 0) > (best.influence ?? 0) ? node : best));
    if (chart.pinned !== strongest.id) app.pin(chart, strongest.id);
    chart.drawn?.nodes.get(strongest.id)?.focus({ preventScroll: true });
  }

  function refold(change) {
    change();
    build({ growing: true });
    remember(true);
  }

  function showPanel() {
    // A new element, which starts at its top: to set the scroll position would lay out the whole page at once.
    part("panel").replaceChildren(el("div", { class: "panel-content" }, panelContent()));
    state.panel = pinName(pinned());
  }

  /** What is looked at, as named values: what the controls say, and what is pinned. */
  function tell() {
    const { all, open } = state.folds;
    return { ...controls.tell(), mlps: all ? "all" : [...open].join(",") || null, pin: pinName(pinned()) };
  }

  /** The same backwards; of what the values do not say, what is there at first. */
  function take(values) {
    takeFolds(values);
    controls.take(values);
    for (const chart of state.charts) chart.pinned = null;
    const [, side, id] = /^(B?)(\d+)$/.exec(values.pin ?? "") ?? [];
    const chart = state.charts[side ? 1 : 0];
    if (id !== undefined && chart?.graph.nodes.has(Number(id))) chart.pinned = Number(id);
  }

  /** Which MLPs are unfolded: those that values say, and those of a component that is pinned. */
  function takeFolds({ mlps = "", pin = "" }) {
    const before = JSON.stringify([state.folds.all, ...state.folds.open]);
    state.folds = mlps === "all" ? { all: true, open: new Set() } : { all: false, open: new Set(mlps.split(",").filter(Boolean)) };
    const id = Number(/^\d+$/.exec(pin)?.[0] ?? NaN);
    if (state.given.length === 1) {
      const run = mlpRuns(state.given[0].data).find(({ members }) => members.slice(1).some((node) => node.id === id));
      if (run) state.folds.open.add(run.key);
    }
    if (JSON.stringify([state.folds.all, ...state.folds.open]) !== before) place({ growing: true });
  }

  /** Show what values say of the circuits that are on the screen. */
  function restore(values) {
    take(values);
    redraw(controls.filters);
    showPanel();
  }

  const soon = debounced((run) => run());
  const sizes = new ResizeObserver((entries) => {
    const seen = state.charts.filter((chart) => entries.some((entry) => entry.target === chart.host && entry.contentRect.width));
    const reshaped = seen.filter((chart) => chart.resize()).length > 0;
    if (!seen.length || !(controls.refit(fitting()) || reshaped)) return;
    // What is quickly drawn is drawn for the very frame that has the new size.
    const quick = state.charts.every((chart) => chart.geometry.nodes.size + chart.geometry.edges.length < QUICK);
    if (quick) redraw(controls.filters);
    else soon(() => redraw(controls.filters));
  });

  /**
   * Show one indexed circuit, or two beside each other, `among` others, as `values` tell. `growing`: the same as before,
   * with more in it.
   */
  function show(given, { among = given, growing = false, values = null } = {}) {
    Object.assign(state, { given, among });
    if (!growing) state.folds = { ...freshFolds(), all: state.folds.all };
    build({ growing, values });
  }

  const fitting = () => (state.charts.length === 1 ? state.charts[0].fits : undefined);

  function build({ growing, values = null }) {
    const before = place({ growing });
    if (values) take(values);
    state.charts.forEach((chart, i) => putBack(chart, before[i]));
    redraw(controls.filters);
    showPanel();
  }

  /** Make the charts of what was given, with MLPs folded (but not of two circuits, whose edges are compared). */
  function place({ growing }) {
    const graphs = state.given.length === 1 && !state.folds.all ? [foldGraph(state.given[0], state.folds.open)] : state.given;
    hideCard();
    const before = growing ? state.charts.map(kept) : [];
    [...state.shown, ...graphs].forEach(unmark);
    state.shown = graphs;
    state.edge = null;
    state.withPositions = graphs.length === 2 && markShared(graphs[0], graphs[1]);
    container.classList.toggle("comparing", graphs.length === 2);
    const hosts = graphs.map((graph, i) => el("div", { class: "host", "data-side": "AB"[i] }));
    const caption = (i) => el("figcaption", {}, el("b", {}, "AB"[i]), " ", heading(graphs[i].data.title));
    const frames = hosts.map((host, i) => el("figure", { class: "frame" }, graphs.length === 2 ? caption(i) : null, host));
    part("charts").replaceChildren(...frames);
    const label = (graph) => `Circuit: ${inert(graph.data.question)}. Arrow keys follow the edges, Enter pins.`;
    sizes.disconnect();
    state.charts = hosts.map((host, i) => createChart(host, graphs[i], label(graphs[i])));
    for (const chart of state.charts) {
      makeInteractive(chart, app);
      sizes.observe(chart.host);
    }
    describe(graphs);
    controls.reset(graphs, { among: state.among, growing, fits: fitting() });
    return before;
  }

  const runsOfAll = () => (state.given.length === 1 ? mlpRuns(state.given[0].data) : []);

  /** A button that unfolds all MLPs, or folds them again, where there are some. */
  function offerFolding() {
    const runs = runsOfAll();
    const some = !state.folds.all && runs.some(({ key }) => !state.folds.open.has(key));
    part("fold-all").hidden = !runs.length;
    part("fold-all").textContent = some ? "Unfold all MLPs" : "Fold MLPs";
  }
  part("fold-all").addEventListener("click", () => {
    const fold = part("fold-all").textContent === "Fold MLPs";
    refold(() => (state.folds = { ...freshFolds(), all: !fold }));
  });

  function redraw(filters) {
    drawing(true);
    offerFolding();
    for (const chart of state.charts) chart.resize();
    const drawings = state.charts.map((chart, i) => chart.show(filters, state.charts[1 - i]?.graph));
    part("status").textContent = state.charts.length === 2 ? "" : status(state.charts[0]);
    Promise.all(drawings).then(() => {
      find(part("search").value, false);
      if (state.panel !== pinName(pinned())) showPanel(); // what was pinned may be filtered out
      const chart = pinned();
      if (chart) showCounterparts(chart, chart.pinned);
      remember();
      drawing(false);
    });
  }

  function status({ graph, selection: { shown, rest } }) {
    if (!shown.length && !rest.length) return `no edge passes the filters, of ${plural(graph.edges.length, "edge")}`;
    const folded = [...graph.nodes.values()].reduce((count, { members }) => count + (members?.ids.length ?? 0), 0);
    const inside = folded ? `; ${folded} MLPs folded` : "";
    return `${plural(shown.length, "edge")} drawn${rest.length ? `, ${plural(rest.length, "weaker one")} bundled` : ""}${inside}`;
  }

  function describe(shown) {
    const { data: circuit } = shown[0];
    const questions = [...new Set(shown.map((graph) => graph.data.question))];
    const asked = questions.flatMap((text, i) => [i ? ", and why " : "", heading(text)]);
    part("question").replaceChildren("Why ", ...asked, "?");
    const each = shown.map(({ data, edges }, i) => `${"AB"[i]}: ${data.model.name}, ${plural(edges.length, "edge")}`);
    const alone = [circuit.model.name, circuit.method.name, ...(shown[0].edges.length ? [circuit.size] : [])].join(" · ");
    part("subtitle").replaceChildren(heading(shown.length === 2 ? each.join(" · ") : alone, SUBTITLE));
    const legend = effectLegend(shown);
    part("effects").hidden = legend === null;
    part("effects-words").textContent = legend ?? "";
    sayEmpty(shown);
  }

  /** Where a circuit has no edges, a message takes the place of its drawing; without any, nothing is left to control. */
  function sayEmpty(shown) {
    const empty = shown.map((graph) => !graph.edges.length);
    shown.forEach((graph, i) => {
      const { host } = state.charts[i];
      host.classList.toggle("without", empty[i]);
      if (empty[i]) host.append(emptyMessage(graph));
    });
    for (const id of ["toolbar", "stage-bar", "search-box", "save"]) part(id).hidden = empty.every(Boolean);
  }

  // Search: matches are ringed as one types, Enter walks through them.

  let walk = 0;
  function find(text, announce = true) {
    const found = state.charts.map((chart) => search(chart.graph, text));
    state.charts.forEach((chart, i) => chart.matches(new Set(found[i].map((node) => node.id))));
    const count = found.reduce((sum, list) => sum + list.length, 0);
    part("found").textContent = text.trim() ? (count ? `${count} found` : "none") : "";
    if (announce) walk = 0;
    return found;
  }

  function nextMatch() {
    const found = find(part("search").value, false);
    const matches = found.flatMap((list, i) => list.map((node) => [state.charts[i], node.id]));
    const visible = matches.filter(([chart, id]) => chart.drawn.nodes.has(id));
    if (!visible.length) return;
    const [chart, id] = visible[walk++ % visible.length];
    if (chart.pinned !== id) choose(chart, id);
  }

  part("search").addEventListener("input", (event) => find(event.target.value));
  part("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextMatch();
    if (event.key === "Escape") {
      event.target.value = "";
      find("");
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || !container.checkVisibility()) return;
    event.preventDefault();
    part("search").focus();
  });
  part("fit").addEventListener("click", () => state.charts.forEach((chart) => chart.viewport.fit()));
  part("closer").addEventListener("click", () => state.charts.forEach((chart) => chart.viewport.zoom(1.3)));
  part("farther").addEventListener("click", () => state.charts.forEach((chart) => chart.viewport.zoom(1 / 1.3)));
  for (const [id, save] of [["save-svg", saveSvg], ["save-png", savePng]]) {
    const saveAll = () => state.charts.forEach((chart, i) => save(chart, shorten(inert(chart.graph.data.question), 100), fileName(chart, i)));
    part(id).addEventListener("click", saveAll);
  }

  // A frame may get its width only after its script has run.
  const narrow = matchMedia("(max-width: 860px)");
  const fold = () => (part("toolbar").open = !narrow.matches);
  narrow.addEventListener("change", fold);
  fold();
  return Object.assign(state, { show, choose, showPanel, tell, restore });
}

/** What a person did to a chart, by names that outlive it. */
function kept(chart) {
  return { name: chart.graph.nodes.get(chart.pinned)?.name, view: chart.viewport.view.moved ? { ...chart.viewport.view } : null };
}

function putBack(chart, before) {
  if (!before) return;
  const node = [...chart.graph.nodes.values()].find(({ name }) => name === before.name);
  if (node) chart.pinned = node.id;
  if (before.view) Object.assign(chart.viewport.view, before.view);
}

function fileName(chart, i) {
  const words = chart.graph.data.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  return `circuit-${words.replace(/^-|-$/g, "") || i + 1}`;
}
