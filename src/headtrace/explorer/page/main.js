// Puts the page together: which circuits are on the screen, and what happens when something is looked at.

import { createAddress, wholeNumber } from "./address.js";
import { createChart } from "./chart.js";
import { comparePanel, counterparts, markShared, unmark } from "./compare.js";
import { createControls, debounced, search } from "./controls.js";
import { effectLegend, emptyMessage, heading, nodePanel, overviewPanel } from "./details.js";
import { byId, el } from "./dom.js";
import { savePng, saveSvg } from "./export.js";
import { indexCircuit } from "./graph.js";
import { hideCard, makeInteractive } from "./interaction.js";
import { inert, plural, shorten } from "./text.js";
import { createTheme } from "./theme.js";

const QUICK = 400; // components and edges
const SUBTITLE = 270; // letters: what a complete circuit has to say of its size, and a name

export function start() {
  const data = JSON.parse(byId("data").textContent);
  const graphs = data.circuits.map(indexCircuit);
  const state = { chosen: [0], charts: [], withPositions: false, panel: null };
  const controls = createControls(graphs, (filters) => redraw(filters));
  const address = createAddress((values) => restore(values));
  createTheme();

  const app = {
    pin(chart, id) {
      for (const other of state.charts) if (other !== chart) other.pinned = null;
      chart.pinned = id !== null && chart.pinned === id ? null : id;
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
      return nodePanel(chart.graph, node, (id) => choose(chart, id), () => app.pin(chart, null));
    }
    if (!second) return overviewPanel(first.graph, (id) => choose(first, id));
    return comparePanel(first.graph, second.graph, state.withPositions, (which, id) => choose(state.charts[which], id));
  }

  function showPanel() {
    // A new element, which starts at its top: to set the scroll position would lay out the whole page at once.
    byId("panel").replaceChildren(el("div", { class: "panel-content" }, panelContent()));
    state.panel = pinName(pinned());
  }

  // The address says what is looked at: which circuits, what the controls say, what is pinned.

  const first = data.compare && graphs.length === 2 ? [0, 1] : [0];

  function remember(step = false) {
    const circuits = String(state.chosen) === String(first) ? null : state.chosen.map((i) => i + 1).join();
    address.write({ circuits, ...controls.tell(), pin: pinName(pinned()) }, step);
  }

  function restore(values) {
    const chosen = [...new Set((values.circuits ?? "").split(",").map((text) => wholeNumber(text, 1, graphs.length)))];
    const before = String(state.charts.length ? state.chosen : "");
    state.chosen = chosen.includes(null) || chosen.length > 2 ? first : chosen.map((number) => number - 1);
    [byId("first").value, byId("second").value] = [state.chosen[0], state.chosen[1] ?? ""];
    if (String(state.chosen) !== before) return build(values);
    take(values);
    redraw(controls.filters);
    showPanel();
  }

  /** What an address says of the circuits that are on the screen; of what it does not say, what is there at first. */
  function take(values) {
    controls.take(values);
    for (const chart of state.charts) chart.pinned = null;
    const [, side, id] = /^(B?)(\d+)$/.exec(values.pin ?? "") ?? [];
    const chart = state.charts[side ? 1 : 0];
    if (id !== undefined && chart?.graph.nodes.has(Number(id))) chart.pinned = Number(id);
  }

  const soon = debounced((run) => run());
  const sizes = new ResizeObserver((entries) => {
    const shown = state.charts.filter((chart) => entries.some((entry) => entry.target === chart.host));
    if (!shown.filter((chart) => chart.resize()).length) return;
    // What is quickly drawn is drawn for the very frame that has the new size.
    const quick = state.charts.every((chart) => chart.geometry.nodes.size + chart.geometry.edges.length < QUICK);
    if (quick) redraw(controls.filters);
    else soon(() => redraw(controls.filters));
  });

  function build(values = null) {
    hideCard();
    const shown = state.chosen.map((i) => graphs[i]);
    graphs.forEach(unmark);
    if (shown.length === 2) state.withPositions = markShared(shown[0], shown[1]);
    document.body.classList.toggle("comparing", shown.length === 2);
    const hosts = shown.map((graph, i) => el("div", { class: "host", "data-side": "AB"[i] }));
    const caption = (i) => el("figcaption", {}, el("b", {}, "AB"[i]), " ", heading(shown[i].data.title));
    const frames = hosts.map((host, i) => el("figure", { class: "frame" }, shown.length === 2 ? caption(i) : null, host));
    byId("charts").replaceChildren(...frames);
    const label = (graph) => `Circuit: ${inert(graph.data.question)}. Arrow keys follow the edges, Enter pins.`;
    state.charts = hosts.map((host, i) => createChart(host, shown[i], label(shown[i])));
    for (const chart of state.charts) {
      makeInteractive(chart, app);
      sizes.observe(chart.host);
    }
    controls.reset(shown);
    if (values) take(values);
    describe(shown);
    redraw(controls.filters);
    showPanel();
  }

  function redraw(filters) {
    const page = document.documentElement.dataset;
    delete page.ready;
    for (const chart of state.charts) chart.resize();
    const drawings = state.charts.map((chart, i) => chart.show(filters, state.charts[1 - i]?.graph));
    byId("status").textContent = state.charts.length === 2 ? "" : status(state.charts[0]);
    Promise.all(drawings).then(() => {
      find(byId("search").value, false);
      if (state.panel !== pinName(pinned())) showPanel(); // what was pinned may be filtered out
      const chart = pinned();
      if (chart) showCounterparts(chart, chart.pinned);
      remember();
      page.drawn = String(Number(page.drawn ?? 0) + 1);
      page.ready = "true";
    });
  }

  function status({ graph, selection: { shown, rest } }) {
    if (!shown.length && !rest.length) return `no edge passes the filters, of ${plural(graph.edges.length, "edge")}`;
    return `${plural(shown.length, "edge")} drawn${rest.length ? `, ${plural(rest.length, "weaker one")} bundled` : ""}`;
  }

  function describe(shown) {
    const { data: circuit } = shown[0];
    const questions = [...new Set(shown.map((graph) => graph.data.question))];
    const asked = questions.flatMap((text, i) => [i ? ", and why " : "", heading(text)]);
    byId("question").replaceChildren("Why ", ...asked, "?");
    const each = shown.map(({ data, edges }, i) => `${"AB"[i]}: ${data.model.name}, ${plural(edges.length, "edge")}`);
    const alone = [circuit.model.name, circuit.method.name, ...(shown[0].edges.length ? [circuit.size] : [])].join(" · ");
    byId("subtitle").replaceChildren(heading(shown.length === 2 ? each.join(" · ") : alone, SUBTITLE));
    const legend = effectLegend(shown);
    byId("effects").hidden = legend === null;
    byId("effects-words").textContent = legend ?? "";
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
    for (const id of ["toolbar", "stage-bar", "search-box", "save"]) byId(id).hidden = empty.every(Boolean);
  }

  // Several circuits: a switch, and a second one beside the first.

  function fillChoices() {
    const title = (graph, i) => `${i + 1}. ${shorten(inert(graph.data.title), 70)}`;
    const options = () => graphs.map((graph, i) => el("option", { value: i }, title(graph, i)));
    byId("first").replaceChildren(...options());
    byId("second").replaceChildren(el("option", { value: "" }, "nothing"), ...options());
    byId("choice").hidden = graphs.length < 2;
  }

  function choiceChanged() {
    const [first, second] = [byId("first").value, byId("second").value];
    state.chosen = second === "" || second === first ? [Number(first)] : [Number(first), Number(second)];
    if (second === first) byId("second").value = "";
    build();
    remember(true);
  }

  // Search: matches are ringed as one types, Enter walks through them.

  let walk = 0;
  function find(text, announce = true) {
    const found = state.charts.map((chart) => search(chart.graph, text));
    state.charts.forEach((chart, i) => chart.matches(new Set(found[i].map((node) => node.id))));
    const count = found.reduce((sum, list) => sum + list.length, 0);
    byId("found").textContent = text.trim() ? (count ? `${count} found` : "none") : "";
    if (announce) walk = 0;
    return found;
  }

  function nextMatch() {
    const found = find(byId("search").value, false);
    const matches = found.flatMap((list, i) => list.map((node) => [state.charts[i], node.id]));
    const visible = matches.filter(([chart, id]) => chart.drawn.nodes.has(id));
    if (!visible.length) return;
    const [chart, id] = visible[walk++ % visible.length];
    if (chart.pinned !== id) choose(chart, id);
  }

  byId("search").addEventListener("input", (event) => find(event.target.value));
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextMatch();
    if (event.key === "Escape") {
      event.target.value = "";
      find("");
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    byId("search").focus();
  });
  for (const id of ["first", "second"]) byId(id).addEventListener("change", choiceChanged);
  byId("fit").addEventListener("click", () => state.charts.forEach((chart) => chart.viewport.fit()));
  byId("closer").addEventListener("click", () => state.charts.forEach((chart) => chart.viewport.zoom(1.3)));
  byId("farther").addEventListener("click", () => state.charts.forEach((chart) => chart.viewport.zoom(1 / 1.3)));

  function fileName(i) {
    const words = graphs[state.chosen[i]].data.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    return `circuit-${words.replace(/^-|-$/g, "") || i + 1}`;
  }
  for (const [id, save] of [["save-svg", saveSvg], ["save-png", savePng]]) {
    const saveAll = () => state.charts.forEach((chart, i) => save(chart, shorten(inert(chart.graph.data.question), 100), fileName(i)));
    byId(id).addEventListener("click", saveAll);
  }

  if (innerWidth <= 860) byId("toolbar").open = false;
  fillChoices();
  restore(address.read());
  return state;
}
