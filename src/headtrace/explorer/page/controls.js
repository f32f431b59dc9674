// The controls: filters (which are also the legend), detail, search, theme, the choice of circuits.

import { oneOf, wholeNumber } from "./address.js";
import { el, svg } from "./dom.js";
import { shape } from "./drawing.js";
import { FILTERS, KINDS, PATHS, SIDES, hasBoth } from "./graph.js";
import { componentName, percent, plural, thousands, tokenLabel } from "./text.js";
import { hasWords, unsupported } from "./words.js";

const ALL_AT_ONCE = 160;
const AT_FIRST = 110;
const OF_BOTH = 70; // why heads attend and what is moved lie on top of each other
const FEWER = [70, 60, 50, 45, 40, 35, 30, 25]; // tried in turn where names would be too small
const WORDED = 40; // words need room

export function freshFilters() {
  return structuredClone(FILTERS);
}

/**
 * How many edges are drawn one by one at first: all of a small circuit, the strongest of a large one. `fits(count)` says
 * whether the window has room for so many with all names at a size that can be read: then for as many as have it.
 */
export function firstDetail(graphs, fits = () => false) {
  const most = Math.max(...graphs.map((graph) => graph.edges.length));
  if (graphs.some(hasWords) && most > WORDED) return WORDED;
  const all = most <= ALL_AT_ONCE ? Infinity : graphs.some(hasBoth) ? OF_BOTH : AT_FIRST;
  if (!graphs.some(hasBoth) || fits(all)) return all;
  return FEWER.find((count) => count < most && fits(count)) ?? (most > OF_BOTH ? OF_BOTH : all);
}

/** Wire the controls, which `part` finds by their ids. `changed(filters)` is called whenever a filter moves. */
export function createControls(part, changed) {
  const filters = freshFilters();
  let active = [];
  let atFirst = Infinity;
  let touched = false;
  const wait = debounced(() => changed(filters));

  let pressed = []; // what makes the chips say again what is shown
  const paths = pathSwitch(part, filters, () => changed(filters));

  /** A chip for each side and kind that some circuits have. */
  function offer(graphs) {
    const sides = new Set(graphs.flatMap((graph) => graph.edges.map((edge) => edge.side)));
    const kinds = new Set(graphs.flatMap((graph) => [...graph.nodes.values()].map((node) => node.kind)));
    const sideLabels = Object.keys(SIDES).filter((side) => sides.has(side)).map((side) => [side, side]);
    const kindLabels = Object.keys(KINDS).filter((kind) => kinds.has(kind) && kind !== "root").map((kind) => [kind, KINDS[kind].label]);
    pressed = [
      chips(part("sides"), sideLabels, filters.sides, sideSample, () => changed(filters)),
      chips(part("kinds"), kindLabels, filters.kinds, kindSample, () => changed(filters)),
      chips(part("words"), [["words", "words"]], filters, () => quote("“ ”"), () => changed(filters)),
    ];
  }

  const detail = part("detail");
  const most = () => Math.max(1, ...active.map((graph) => graph.edges.length));
  // The slider is logarithmic: from five edges to all of them.
  const span = () => Math.log(Math.max(2, most() / 5));
  const countAt = (value) => (value >= 1000 ? Infinity : Math.round(5 * Math.exp((value / 1000) * span())));
  const valueFor = (count) => (count >= most() ? 1000 : Math.round((1000 * Math.log(count / 5)) / span()));
  const sayDetail = () => {
    const total = most();
    const shown = Math.min(total, filters.detail);
    if (!active.some((graph) => graph.edges.length)) return;
    const share = shown >= total ? "all" : `strongest ${thousands(shown)} of`;
    part("detail-value").textContent = `${share} ${plural(total, "edge")}`;
  };
  detail.addEventListener("input", () => {
    filters.detail = countAt(Number(detail.value));
    touched = true;
    sayDetail();
    wait();
  });

  const weight = part("weight");
  const weigh = () => {
    filters.minWeight = (Number(weight.value) / 100) ** 2;
    const limit = filters.minWeight === 0 ? "any" : `≥ ${percent(filters.minWeight)} of the heaviest`;
    part("weight-value").textContent = limit;
  };
  weight.addEventListener("input", () => {
    weigh();
    wait();
  });

  const [low, high] = [part("layer-low"), part("layer-high")];
  const limitLayers = () => {
    const limits = [Number(low.value), Number(high.value)];
    filters.layers = [Math.min(...limits), Math.max(...limits)];
  };
  for (const input of [low, high]) {
    input.addEventListener("input", () => {
      limitLayers();
      touched = true;
      wait();
    });
  }

  const match = part("match");
  match.addEventListener("change", () => {
    filters.match = match.value;
    touched = true;
    changed(filters);
  });

  /** Set the controls for the circuits that are on the screen, among others; for one that grows, what a person set stays. */
  function reset(nowActive, { among = nowActive, growing = false, fits } = {}) {
    active = nowActive;
    part("match-control").hidden = active.length < 2;
    part("words").hidden = !active.some(hasWords);
    showLegend(part("legend"), active);
    paths.reset(active.some(hasBoth));
    atFirst = asManyAsFit(fits);
    offer(among);
    const top = Math.max(...active.map((graph) => graph.layers[1]));
    for (const input of [low, high]) input.max = top;
    if (!(growing && touched)) {
      touched = false;
      filters.detail = atFirst;
      detail.value = valueFor(filters.detail);
      [low.value, high.value] = [0, top];
      filters.layers = [0, Infinity];
      filters.match = match.value = "all";
    }
    sayDetail();
  }

  const asManyAsFit = (fits) => firstDetail(active, (count) => fits?.({ ...filters, detail: count }));

  /** In a window of another size there is room for more or fewer edges, unless somebody chose how many; true if there is. */
  function refit(fits) {
    const before = atFirst;
    atFirst = asManyAsFit(fits);
    if (filters.detail !== before || atFirst === before) return false;
    filters.detail = atFirst;
    detail.value = valueFor(filters.detail);
    sayDetail();
    return true;
  }

  /** What the controls say, by name, as far as it is not what they say at first. */
  function tell() {
    const hidden = [filters.sides, filters.kinds].flatMap((shown) => Object.keys(shown).filter((name) => !shown[name]));
    const layers = `${filters.layers[0]}-${Math.min(filters.layers[1], Number(high.max))}`;
    return {
      paths: filters.paths === "both" ? null : filters.paths,
      hide: hidden.join(",") || null,
      detail: filters.detail === atFirst ? null : filters.detail === Infinity ? "all" : filters.detail,
      weight: Number(weight.value) || null,
      layers: layers === `0-${high.max}` ? null : layers,
      match: filters.match === "all" ? null : filters.match,
      words: filters.words ? null : "off",
    };
  }

  /** The same backwards: the controls say what they are told, and what they say at first where they are told nothing. */
  function take(values) {
    const hidden = (values.hide ?? "").split(",");
    for (const shown of [filters.sides, filters.kinds]) for (const name of Object.keys(shown)) shown[name] = !hidden.includes(name);
    filters.kinds.root = true; // `root` is the side
    filters.words = values.words !== "off";
    for (const press of pressed) press();
    paths.choose(active.some(hasBoth) ? (oneOf(values.paths, PATHS) ?? "both") : "both");
    filters.detail = values.detail === "all" ? Infinity : (wholeNumber(values.detail, 1, Number.MAX_SAFE_INTEGER) ?? atFirst);
    detail.value = valueFor(filters.detail);
    sayDetail();
    weight.value = wholeNumber(values.weight, 0, 100) ?? 0;
    weigh();
    const top = Number(high.max);
    const limits = (values.layers ?? "").split("-").map((text) => wholeNumber(text, 0, top));
    const whole = limits.length !== 2 || limits.includes(null);
    [low.value, high.value] = whole ? [0, top] : limits;
    if (whole) filters.layers = [0, Infinity];
    else limitLayers();
    filters.match = match.value = active.length > 1 && ["shared", "only"].includes(values.match) ? values.match : "all";
  }
  return { filters, reset, refit, tell, take };
}

/** Which paths are shown: offered where a circuit has several. Sides that are on none of them cannot be chosen. */
function pathSwitch(part, filters, changed) {
  const group = part("paths");
  const choose = (name) => {
    filters.paths = name;
    for (const chip of part("sides").children) chip.disabled = !(PATHS[name].sides ?? Object.keys(SIDES)).includes(chip.dataset.name);
  };
  const options = Object.entries(PATHS).map(([name, { label }]) => {
    const input = el("input", { type: "radio", name: "paths", value: name, checked: name === filters.paths });
    input.addEventListener("change", () => {
      choose(name);
      changed();
    });
    return el("label", { "data-name": name }, input, label);
  });
  group.append(...options);

  /** What was chosen stays, as long as there is a choice. */
  function reset(offered) {
    group.hidden = !offered;
    set(offered ? filters.paths : "both");
  }

  function set(name) {
    choose(name);
    group.querySelector(`[value="${name}"]`).checked = true;
  }
  return { reset, choose: set };
}

/** What the lines mean, in words, where there are more of them than chips can say. */
function showLegend(legend, active) {
  const edges = active.flatMap((graph) => graph.edges);
  const content = edges.some(({ side }) => side === "value" || side === "input");
  const opposing = edges.some((edge) => edge.opposing) || active.some(({ amounts }) => amounts?.some(({ value }) => value < 0));
  const entry = (name, samples, words) => el("span", { "data-name": name }, samples, words);
  const entries = [
    edges.some(({ side }) => SIDES[side].attention) && entry("attention", [sideSample("query"), sideSample("key")], "why a head attends: its query, its key"),
    content && entry("content", [sideSample("value")], "what is moved: into a value, an MLP, the root"),
    opposing && entry("opposing", [opposingSample()], active.some(({ difference }) => difference) ? "opposing: flows against the difference" : "opposing: takes away from the root"),
    active.some(hasWords) && entry("words", [quote("“ ”")], `what a head looks for${edges.some(unsupported) ? "; with “?”: did not pass its test" : ""}`),
  ];
  legend.replaceChildren(...entries.filter(Boolean));
  legend.hidden = !content && !opposing && !edges.some(unsupported);
}

/** Buttons that show and hide; returns what makes them say again what is shown. */
function chips(group, labels, values, sample, changed) {
  const buttons = labels.map(([name, label]) => {
    const attributes = { type: "button", class: "chip", "data-name": name, "aria-pressed": String(values[name]) };
    const button = el("button", { ...attributes, title: `Show or hide: ${label}` }, sample(name), label);
    button.addEventListener("click", () => {
      values[name] = !values[name];
      button.setAttribute("aria-pressed", String(values[name]));
      changed();
    });
    return button;
  });
  group.replaceChildren(...buttons);
  return () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(values[button.dataset.name]));
  };
}

function quote(mark) {
  return el("span", { class: "quote", "aria-hidden": "true" }, mark);
}

function sideSample(side) {
  return sampleOf(10, svg("path", { class: `edge ${side}`, d: "M-12,0H12", "stroke-width": 2.5 }));
}

function opposingSample() {
  const line = svg("path", { class: "edge value opposing", d: "M-12,0H9", "stroke-width": 2.5 });
  return sampleOf(12, svg("g", {}, line, svg("path", { class: "edge-end value opposing", d: "M10,-5V5" })));
}

function kindSample(kind) {
  const [w, h] = kind === "head" ? [22, 13] : KINDS[kind].size.map((size) => size * 0.65);
  return sampleOf(16, svg("g", { class: `node ${kind}` }, ...shape({ kind, attention: null }, { w, h })));
}

function sampleOf(height, drawing) {
  const viewBox = `-13 ${-height / 2} 26 ${height}`;
  return svg("svg", { class: "sample", width: 26, height, viewBox, "aria-hidden": "true" }, drawing);
}

/** Run once in the next frame, however often it is asked for until then. */
export function debounced(run) {
  let waiting = 0;
  return (...given) => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => run(...given));
  };
}

/** Nodes that a search means: L9H6, 9.6, mlp 5, a name with positions, or a token. */
export function search(graph, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const dotted = /^(\d+)[.:](\d+)$/.exec(wanted);
  const nodes = [...graph.nodes.values()].filter((node) => node.kind !== "root");
  const by = (test) => nodes.filter(test).sort((a, b) => (b.influence ?? 0) - (a.influence ?? 0));
  if (dotted) return by((node) => componentName(node) === `L${Number(dotted[1])}H${Number(dotted[2])}`);
  const mlp = /^mlp (\d+)$/.exec(wanted);
  const exact = by((node) => componentName(node).toLowerCase() === wanted || (mlp && node.members?.layers.includes(Number(mlp[1]))));
  if (exact.length) return exact;
  const named = by((node) => node.name.toLowerCase().startsWith(wanted));
  if (named.length) return named;
  return by((node) => tokenLabel(graph.tokens[node.dest]).toLowerCase().includes(wanted));
}
