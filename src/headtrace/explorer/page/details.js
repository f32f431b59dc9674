// Words about what is looked at: the card under the pointer and the panel beside the drawing.

import { el } from "./dom.js";
import { effectValue } from "./drawing.js";
import { KINDS, SIDES, amountOf, unexpanded } from "./graph.js";
import { brief, componentName, inert, inertLines, number, pValue, percent, plural, shorten, signed, tokenExact } from "./text.js";
import { readable, unsupported, wordsOf } from "./words.js";

const TITLE = 160;

/** Text from a circuit in a heading: inert, and not endless. */
export function heading(text, most = TITLE) {
  return el("bdi", {}, shorten(inert(text), most));
}

/** What the numbers of a measured effect are, in words; `unit` is what the root measures. */
const EFFECTS = {
  attention: () => "change of attention, edge removed",
  metric: (unit) => `change of ${unit}, edge removed`,
  boost_attention: () => "change of attention, edge boosted",
  boost_metric: (unit) => `change of ${unit}, edge boosted`,
  control_attention: () => "change of attention, random channels",
  control_metric: (unit) => `change of ${unit}, random channels`,
  cosine: () => "residual, before and after: cosine",
  norm_ratio: () => "residual, before and after: norm ratio",
};

/** The numbers written on edges, in words: what was measured on the edges of these circuits. */
export function effectLegend(graphs) {
  const named = graphs.flatMap((graph) => graph.edges.map((edge) => [graph, effectValue(edge)]));
  const found = named.filter(([, effect]) => effect !== null);
  if (!found.length) return null;
  const words = new Set(found.map(([graph, { key }]) => (key === "attention" ? key : key === "metric" ? graph.data.root_measure : inert(key))));
  return `measured change of ${[...words].join(" or ")} without that edge`;
}

function token(graph, position) {
  return el("bdi", { class: "token", title: `position ${position}` }, tokenExact(graph.tokens[position]));
}

function facts(rows) {
  const pairs = rows.filter(Boolean).flatMap(([term, ...value]) => [el("dt", {}, term), el("dd", {}, ...value)]);
  return el("dl", { class: "facts" }, pairs);
}

function meter(value) {
  const bar = el("span", { class: "meter" }, el("span", {}));
  bar.firstChild.style.width = `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
  return bar;
}

function nodeFacts(graph, node) {
  if (node.kind === "root") return rootFacts(graph, node);
  if (node.members) return foldedFacts(graph, node);
  const predicted = Object.entries(node.predicted ?? {}).filter(([, value]) => value !== null);
  return facts([
    [node.kind === "head" ? "writes at" : "at", token(graph, node.dest), ` ${node.dest}`],
    node.src !== null && ["reads", token(graph, node.src), ` ${node.src}`],
    node.attention !== null && ["attention", number(node.attention), meter(node.attention)],
    node.threshold != null && ["threshold", number(node.threshold)],
    ...predicted.map(([side, value]) => [`without ${side}`, `${number(value)} (predicted)`]),
    node.influence !== null && ["influence", percent(node.influence), meter(node.influence)],
    node.contribution != null && contributionRow(graph, node.contribution),
    node.flow != null && flowRow(graph, "flow", node.flow),
    node.moves != null && ["moves something else", signed(node.moves)],
    node.attends != null && ["attends differently", `${signed(node.attends)} (attention ${number(node.other_attention)} in the other run)`],
    node.spread && ["over the prompts", `${signed(node.spread[0])} to ${signed(node.spread[1])}`],
    solitary(graph, node),
    node.label && ["label", el("bdi", {}, inert(node.label))],
    (unexpanded(node) || (node.kind === "mlp" && !node.expanded && node.contribution != null)) && ["", "not traced further"],
    !node.explained && ["", "unexplained: its attention holds although everything was removed"],
  ]);
}

/** What a signal does that was found by removing it alone: hold a head down, or carry its attention. */
function aloneWords(edge) {
  return edge.weight < 0 ? "holds it down" : "carries it alone";
}

/** The same in a sentence. */
function aloneRow(graph, edge) {
  if (!edge.alone) return null;
  const name = componentName(graph.nodes.get(edge.target));
  const words = edge.weight < 0 ? `would attend far more: it holds ${name} down` : "attends less than half as much";
  return ["alone", `Without this signal alone, ${name} ${words}.`];
}

/** Why a component is here that nothing needs but heads it holds down, or whose attention it carries alone. */
function solitary(graph, node) {
  if (!node.from.length || !node.from.every((edge) => edge.alone)) return null;
  const listed = (edges) => [...new Set(edges.map((edge) => componentName(graph.nodes.get(edge.target))))].join(", ");
  const [down, alone] = [node.from.filter((edge) => edge.weight < 0), node.from.filter((edge) => edge.weight >= 0)];
  const said = [down.length && `holds ${listed(down)} down`, alone.length && `alone carries the attention of ${listed(alone)}`];
  return ["here because it", said.filter(Boolean).join("; ")];
}

/** What enters MLPs that are folded into one, and what leaves them: the sums of the lines that are listed. */
function foldedFacts(graph, node) {
  const sum = (edges) => {
    const units = new Set(edges.map((edge) => unitOf(graph, edge)));
    return units.size === 1 ? `${number(edges.reduce((total, edge) => total + amountOf(edge), 0))} (${[...units][0]})` : null;
  };
  const [enters, leaves] = [sum(node.into), sum(node.from)];
  return facts([
    ["at", token(graph, node.dest), ` ${node.dest}`],
    ["holds", `MLPs ${node.members.layers.join(", ")}`],
    enters && ["enters", enters],
    leaves && ["leaves", leaves],
    ["", "Edges among them are not drawn. Click it, or press Enter, to unfold it."],
  ]);
}

/** What something contributes to the root, and whether it speaks for it. */
function contributionRow(graph, value) {
  return ["contribution", `${signed(value)} (${graph.data.root_measure})`, value < 0 ? opposingMark() : ""];
}

/** What flows of the difference between two runs, and whether it flows against it. */
function flowRow(graph, name, value) {
  const { value: clean, other_value: other } = graph.difference;
  return [name, `${signed(value)} (${graph.data.root_measure})`, value * (clean - other) < 0 ? opposingMark() : ""];
}

function opposingMark() {
  return el("span", { class: "mark" }, " opposing");
}

/** What a difference circuit compares, and how much of the difference it shows. */
function compared(graph) {
  if (!graph.difference) return null;
  const { prompts, value, other_value: other, shown, automatic, note } = graph.difference;
  const mean = prompts.length > 1 ? " (mean)" : "";
  const rows = prompts.map((prompt) => el("li", {}, el("bdi", {}, inert(prompt.text ?? prompt.token_ids.join(" "))), `: ${signed(prompt.value)}`));
  return section(
    automatic ? "Compared with (found by exchanging words)" : "Compared with",
    el(
      "div",
      { class: "compared" },
      el("ul", {}, ...rows),
      el("p", {}, `${graph.data.root_measure}: ${number(value)} here, ${number(other)}${mean} there, difference ${signed(value - other)}. The edges into the root that are shown carry ${percent(shown)} of it.`),
      note ? el("p", {}, inert(note)) : null,
    ),
  );
}

function rootFacts(graph, node) {
  const { root } = graph.data;
  return facts([
    ["kind", root.kind],
    root.value !== null && [graph.data.root_measure, number(root.value)],
    ["causes", String(node.into.length)],
  ]);
}

function edgeFacts(graph, edge) {
  const [source, target] = [graph.nodes.get(edge.source), graph.nodes.get(edge.target)];
  const at = target[SIDES[edge.side].at];
  return facts([
    ["from", source.name, " ", source.dest === null ? "" : token(graph, source.dest)],
    ["into", edge.side === "root" ? "the root" : `${edge.side} of ${target.name}`, " ", at === null ? "" : token(graph, at)],
    weightRow(graph, edge),
    aloneRow(graph, edge),
    edge.contribution != null && (edge.mixed || SIDES[edge.side].attention) && contributionRow(graph, edge.contribution),
    edge.joined && ["", `the sum of ${edge.joined} edges; unfold the MLPs to see each`],
    edge.channels && [edge.channels.length === 1 ? "channel" : "channels", channelText(edge, target.equal_channels ?? [])],
    edge.logits && ["into the logits", `answer ${signed(edge.logits[0])}, wrong answer ${signed(edge.logits[1])}`],
    source.attention !== null && ["attention", number(source.attention)],
    ["influence", percent(edge.flow)],
    edge.shared !== undefined && ["", edge.shared ? "in both circuits" : "only in this circuit"],
  ]);
}

/** The channels of an edge, each with its flow where that is known; those of equal singular values are one. */
function channelText({ channels, flows }, groups) {
  const named = (channel) => {
    const group = groups.find((members) => members[0] === channel);
    return group ? `${channel}–${group.at(-1)} (equal singular values: one channel)` : String(channel);
  };
  const later = new Set(groups.flatMap((members) => members.slice(1)));
  return channels.flatMap((channel, i) => (later.has(channel) ? [] : [flows ? `${named(channel)} (${signed(flows[i])})` : named(channel)])).join(", ");
}

/** What an edge weighs. Weight is attention, or a contribution; of a node that wrote signals it stands for these, too. */
function weightRow(graph, edge) {
  if (graph.difference) return flowRow(graph, "flow", edge.weight);
  if (SIDES[edge.side].attention) return ["weight", `${number(edge.weight)} (attention)`];
  if (!edge.mixed) return contributionRow(graph, edge.weight);
  return ["weight", `${number(edge.weight)} (${edge.contribution == null ? "for signals" : "for signals as well as content"})`];
}

/** What holds up a signal that an MLP wrote. */
function passage(graph, edge) {
  if (edge.left == null || edge.through == null) return null;
  const names = edge.through.map((id) => graph.nodes.get(id).name);
  const listed = names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}` : names[0];
  const left = edge.left > 0 ? `still writes ${percent(edge.left)}` : `writes nothing (${percent(edge.left)})`;
  const words = names.length
    ? `Without what ${listed} wrote into its input, the MLP ${left} of this ${edge.side} signal.`
    : `Nothing was found in its input that holds this ${edge.side} signal up.`;
  return el("p", { class: "passage" }, words);
}

/** What the running model showed when the edge was put to the test. */
function measurements(graph, edge) {
  const effects = Object.entries(edge.effect ?? {}).filter(([, value]) => value !== null);
  if (!effects.length) return null;
  const shown = (value) => (typeof value === "number" ? number(value) : String(value));
  const rows = effects.map(([name, value]) => {
    const words = EFFECTS[name]?.(graph.data.root_measure) ?? inert(name);
    return el("p", {}, el("span", {}, words), el("b", {}, shown(value)));
  });
  return el("div", { class: "measurements" }, el("p", { class: "kind" }, "Measured in the running model"), ...rows);
}

/** What the number that is told of an edge is measured in. */
function unitOf(graph, edge) {
  if (edge.mixed && edge.contribution == null) return "share of signals";
  return SIDES[edge.side].attention && !graph.difference ? "attention" : graph.data.root_measure;
}

const WORDS = 600; // letters of a description
const PIECE = 160; // letters of a piece of an example

/** What an edge says in words, whether a test bore it out, and the examples behind it; `show` puts these into an element. */
function said(edge, show) {
  if (!edge.description) return null;
  const text = el("p", { class: "description" }, el("bdi", {}, shorten(inert(readable(edge.description.slice(0, 2 * WORDS))), WORDS)));
  const tested = edge.evidence ? [verdict(edge.evidence), show(edge.evidence.examples ?? [])] : [];
  return el("div", { class: unsupported(edge) ? "said unsupported" : "said" }, text, ...tested);
}

function verdict({ supported, p_value: p, accuracy, interval, judged, explainer, judge }) {
  const range = interval ? ` (${interval.map((end) => percent(end)).join(" to ")})` : "";
  const by = explainer && (judge && judge !== explainer ? `words by ${explainer}, judged by ${judge}` : `words by ${explainer}`);
  const facts = [
    p == null ? "not judged" : `p ${pValue(p)}`,
    accuracy != null && `right about ${percent(accuracy)} of ${plural(judged ?? 0, "pair")}${range}`,
    by && inert(by),
  ];
  return el("p", { class: "verdict" }, el("span", { class: "badge" }, supported ? "✓ supported" : "? unsupported"), facts.filter(Boolean).join(" · "));
}

/** The two tokens of each example are underlined: the one that attends with a line, the one attended to with dashes. */
function exampleList(examples) {
  const key = el("p", { class: "examples-key" }, el("span", { class: "pair dest" }, "attends"), " to ", el("span", { class: "pair src" }, "this"), "; ✓: the words hold");
  return [key, el("ul", { class: "examples" }, examples.map(exampleItem))];
}

function exampleItem({ pieces, dest, src, score, holds }) {
  const shown = pieces.flatMap((piece, i) => {
    const role = `${i === dest ? " dest" : ""}${i === src ? " src" : ""}`;
    const text = shorten(inert(piece.slice(0, 2 * PIECE)), PIECE);
    const space = text.length - (text.trimStart() || text).length;
    return role ? [text.slice(0, space), el("span", { class: `pair${role}` }, text.slice(space))] : text;
  });
  const label = holds == null ? "" : holds ? "✓" : "✗";
  const told = [score == null ? null : number(score), label].filter(Boolean).join(" ");
  return el("li", {}, el("bdi", {}, shown), told ? el("span", { class: "score" }, `  ${told}`) : null);
}

/** In the panel, examples are opened when they are wanted. */
function folded(examples) {
  return examples.length ? el("details", {}, el("summary", {}, plural(examples.length, "example")), exampleList(examples)) : null;
}

const ON_CARD = 2;

/** A card cannot be worked: it shows the first of them. */
function first(examples) {
  return examples.length ? el("div", {}, exampleList(examples.slice(0, ON_CARD))) : null;
}

/** The card under the pointer. */
export function nodeCard(graph, node) {
  const title = node.kind === "root" ? graph.data.question : node.name;
  const kind = el("p", { class: "kind" }, KINDS[node.kind].words);
  const words = wordsOf(node).slice(0, ON_CARD).map((edge) => said(edge, () => null));
  return [el("h3", {}, heading(title)), kind, nodeFacts(graph, node), ...words];
}

export function edgeCard(graph, edge) {
  return [el("h3", { class: edge.side }, SIDES[edge.side].card), edgeFacts(graph, edge), passage(graph, edge), measurements(graph, edge), said(edge, first)];
}

/** A token of the axis, in full. */
export function tokenCard(graph, position) {
  const here = [...graph.nodes.values()].filter((node) => node.dest === position).length;
  const id = String(graph.data.prompt.token_ids[position] ?? "unknown");
  const amount = graph.amounts?.[position].value;
  return [
    el("h3", {}, token(graph, position)),
    facts([
      ["position", String(position)],
      ["token id", id],
      ["components", String(here)],
      amount !== undefined && [graph.bars.row, `${signed(amount)} (${graph.data.root_measure})`, amount < 0 ? opposingMark() : ""],
      position === 0 && graph.bars?.constants != null && ["constants and sinks", `${signed(graph.bars.constants)} (${graph.data.root_measure})`],
    ]),
  ];
}

/** Layers without a component, on the layer axis. */
export function skippedCard({ first, last }) {
  const layers = first === last ? `Layer ${first}` : `Layers ${last} to ${first}`;
  return [el("h3", {}, layers), el("p", { class: "kind" }, "no component of this circuit; drawn without their height")];
}

/** Whether a list is sorted by the number that it shows: content has one unit; signals and mixtures go by influence. */
function byAmount(edges) {
  return edges.every((edge) => !SIDES[edge.side].attention);
}

/** What the numbers of a list of edges are, and in which order it stands. */
export function listHead(graph, edges, measured = edges.some((edge) => effectValue(edge)), sorted = false) {
  const units = [...new Set(edges.map((edge) => unitOf(graph, edge)))];
  return el(
    "p",
    { class: "list-head" },
    el("span", { class: "what" }, sorted ? "strongest first" : "by influence"),
    measured ? el("span", { class: "measured", title: "Measured in the running model: the change without this edge" }, "measured") : null,
    el("span", { class: "weight", title: `How much ${units.join(" or ")} the edge accounts for` }, units.length === 1 ? `${numbered(graph, units[0])}: ${units[0]}` : "weight"),
  );
}

/** What numbers of a unit are called: in the unit of the root they are contributions. */
function numbered(graph, unit) {
  return unit === graph.data.root_measure && unit !== "attention" ? "contribution" : "weight";
}

/** What is left of the root's value (or of the difference) without some edges into it: null where they do not sum to it. */
function notShown(graph, shown) {
  const { difference, root } = graph.data;
  const whole = difference ? difference.change : ADDING.has(root.kind) ? root.value : null;
  return whole == null ? null : shown.reduce((rest, edge) => rest - amountOf(edge), whole);
}

const ADDING = new Set(["linear", "direction"]); // roots whose value is the sum of all contributions

/** The rest as a line of its own, so that what is listed adds up. */
function restLine(graph, shown) {
  const rest = notShown(graph, shown);
  if (rest === null || Number(number(rest)) === 0) return null;
  const content = [el("span", { class: "what" }, "not shown"), el("span", { class: "weight" }, number(rest))];
  return el("li", { class: "rest more", title: "All other components, and biases" }, el("div", { class: "row" }, content));
}

/** A list of edges as buttons: each leads to the node at its other end. */
function edgeList(graph, given, end, choose, name = oneEnd) {
  const sorted = byAmount(given);
  const edges = sorted ? [...given].sort((a, b) => Math.abs(amountOf(b)) - Math.abs(amountOf(a))) : given;
  const items = edges.slice(0, 60).map((edge) => {
    const node = graph.nodes.get(edge[end]);
    const effect = effectValue(edge);
    const amount = amountOf(edge);
    const against = graph.difference ? edge.opposing : !SIDES[edge.side].attention && amount < 0;
    return el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: `row ${edge.side}${edge.opposing ? " opposing" : ""}`, "data-index": edge.index, onclick: () => choose(node.id) },
        el("span", { class: "swatch" }),
        el("span", { class: "what" }, name(graph, node, edge)),
        against ? opposingMark() : null,
        edge.alone ? el("span", { class: "mark" }, ` ${aloneWords(edge)}`) : null,
        effect ? el("span", { class: "measured", title: `measured ${effect.key}: ${number(effect.value)}` }, brief(effect.value)) : null,
        el("span", { class: "weight" }, number(amount)),
      ),
      end === "target" ? passage(graph, edge) : null,
      said(edge, folded),
    );
  });
  if (edges.length > 60) items.push(el("li", { class: "more" }, `and ${edges.length - 60} weaker ones`));
  if (edges.every(({ side }) => side === "root") && end === "source") items.push(restLine(graph, edges.slice(0, 60)));
  return el("div", {}, listHead(graph, edges.slice(0, 60), undefined, sorted), el("ul", { class: "edges-list" }, ...items.filter(Boolean)));
}

function oneEnd(graph, node) {
  return [node.name, " ", node.dest === null ? "" : token(graph, node.src ?? node.dest)];
}

/** Where an edge enters: the side, and the node. */
function entrance(graph, node, edge) {
  return edge.side === "root" ? "the root" : `${edge.side} of ${node.name}`;
}

function bothEnds(graph, _, edge) {
  return `${graph.nodes.get(edge.source).name} → ${componentName(graph.nodes.get(edge.target))}`;
}

function section(title, ...content) {
  return el("section", {}, el("h3", {}, title), ...content);
}

/** The panel for a pinned node: what it is, what causes it, what it causes. */
export function nodePanel(graph, node, choose, close) {
  const title = node.kind === "root" ? graph.data.question : node.name;
  const unpin = el("button", { type: "button", class: "quiet", "aria-label": "Unpin", onclick: close }, "✕");
  const causes = Object.keys(SIDES).map((side) => [side, node.into.filter((edge) => edge.side === side)]);
  return [
    el("div", { class: "panel-head" }, el("h2", {}, heading(title)), unpin),
    el("p", { class: "kind" }, KINDS[node.kind].words),
    nodeFacts(graph, node),
    ...causes.filter(([, edges]) => edges.length).map(([side, edges]) =>
      section(SIDES[side].causes, edgeList(graph, edges, "source", choose))),
    elsewhere(graph, node),
    neurons(graph, node),
    node.from.length ? section(node.kind === "mlp" ? "What it wrote" : "What it causes", edgeList(graph, node.from, "target", choose, entrance)) : null,
  ].filter(Boolean);
}

/** Signals of a firing's key side that act on other keys than its source. */
function elsewhere(graph, node) {
  if (!node.elsewhere) return null;
  const rows = node.elsewhere.map((signal) => {
    if (signal.kind) return [`${signal.kind} ${signal.layer ?? ""}`, `weight ${number(signal.weight)}, channels ${signal.channels.join(", ")}`];
    return [`L${signal.layer}H${signal.head}`, "reads ", token(graph, signal.src), ` ${signal.src}, weight ${number(signal.weight)}, channels ${signal.channels.join(", ")}`];
  });
  return section("Acts on other keys only", facts(rows));
}

/** A number as a bar from the middle: right for the root, left against it. */
function balance(share) {
  const bar = el("span", { class: `balance${share < 0 ? " opposing" : ""}` }, el("span", {}));
  bar.firstChild.style.width = `${50 * Math.abs(share)}%`;
  return bar;
}

/** A list of amounts, each with a bar: rows of what it belongs to, the value, its share and, if it can be gone to, how. */
function amountList(graph, rows) {
  const items = rows.map(({ what, value, share, go }) => {
    const content = [el("span", { class: "what" }, what), value < 0 ? opposingMark() : null, balance(share), el("span", { class: "weight" }, signed(value))];
    const row = `row amounts${value < 0 ? " opposing" : ""}`;
    return el("li", {}, go ? el("button", { type: "button", class: row, onclick: go }, content) : el("div", { class: row }, content));
  });
  const head = el("p", { class: "list-head" }, el("span", { class: "what" }, "strongest first"), el("span", {}, graph.data.root_measure));
  return el("div", {}, head, el("ul", { class: "edges-list" }, ...items));
}

/** The hidden units of an MLP that contribute most. */
function neurons(graph, node) {
  if (!node.neurons?.length) return null;
  const most = Math.abs(node.neurons[0].contribution) || 1;
  const rows = node.neurons.map(({ unit, contribution: value }) => ({ what: `unit ${unit}`, value, share: value / most }));
  return section("Hidden units that contribute most", amountList(graph, rows));
}

const TOKENS = 6;

/** The tokens that contribute most: what a reader wants to see first. */
function tokens(graph, choose) {
  if (!graph.amounts) return null;
  const order = graph.amounts.map((amount, position) => ({ ...amount, position })).filter(({ word }) => word);
  const rows = order.sort((a, b) => Math.abs(b.share) - Math.abs(a.share)).slice(0, TOKENS).map(({ position, value, share }) => {
    const node = [...graph.nodes.values()].find(({ kind, dest }) => kind === "embedding" && dest === position);
    return { what: [token(graph, position), ` ${position}`], value, share, go: node && (() => choose(node.id)) };
  });
  const { title, constants } = graph.bars;
  const apart = constants == null ? null : el("p", { class: "kind constants" }, `${signed(constants)}: constants and sinks, which rest on the first token`);
  return rows.length || apart ? section(title, el("div", {}, rows.length ? amountList(graph, rows) : null, apart)) : null;
}

function keys() {
  return section("Keys", facts([
    ["click, Enter", "pin a component, see its causes"],
    ["arrow keys", "follow the edges"],
    ["Ctrl + wheel, + −", "zoom; drag to move; 0 fits"],
    ["/", "search"],
  ]));
}

/** How many edges say something, and how many of them passed the test. */
function wordsFacts(graph) {
  const worded = graph.edges.filter((edge) => edge.description);
  const failed = worded.filter(unsupported).length;
  const tested = worded.some((edge) => edge.evidence) ? `, ${failed} unsupported` : "";
  return worded.length ? [["words", `on ${plural(worded.length, "edge")}${tested}`]] : [];
}

/** The panel when nothing is pinned. */
export function overviewPanel(graph, choose) {
  const { data } = graph;
  const signals = graph.ranked.filter((edge) => SIDES[edge.side].attention).slice(0, 10);
  const largest = (test) => graph.edges.filter(test).sort((a, b) => Math.abs(amountOf(b)) - Math.abs(amountOf(a)));
  const moved = largest((edge) => edge.side !== "root" && !SIDES[edge.side].attention).slice(0, 10);
  const seeds = largest((edge) => edge.side === "root").slice(0, 8);
  return [
    el("h2", {}, "This circuit"),
    el("p", { class: "prompt" }, el("bdi", {}, inertLines(data.prompt.text ?? data.prompt.tokens.join("")))),
    facts([
      ["root", data.root.kind, data.root.value === null ? "" : `, ${data.root_measure} ${number(data.root.value)}`],
      ["model", heading(data.model.name)],
      ["method", heading(data.method.name)],
      ["size", `${plural(data.heads, "firing")}, ${plural((graph.unfolded ?? graph).edges.length, "edge")}`],
      data.influence_kept != null && ["influence kept", percent(data.influence_kept)],
      ...wordsFacts(graph),
      data.unexplained.length > 0 && ["unexplained", data.unexplained.slice(0, 6).join(", ")],
    ]),
    compared(graph),
    tokens(graph, choose),
    seeds.length ? section("Straight into the root", edgeList(graph, seeds, "source", choose)) : null,
    moved.length ? section("Strongest content", edgeList(graph, moved, "source", choose, bothEnds)) : null,
    signals.length ? section("Strongest signals", edgeList(graph, signals, "source", choose, bothEnds)) : null,
    graph.edges.length ? keys() : null,
  ].filter(Boolean);
}

/** In place of the drawing of a circuit without edges: why it is empty, and what to try. */
export function emptyMessage(graph) {
  const { reason, advice } = graph.data;
  return el(
    "div",
    { class: "empty" },
    el("h2", {}, "There is no circuit to draw"),
    el("p", { class: "why" }, el("bdi", {}, reason ? inertLines(`${reason[0].toUpperCase()}${reason.slice(1)}`) : "It has no edges.")),
    advice.length ? el("h3", {}, "What to try") : null,
    advice.length ? el("ul", {}, ...advice.map((line) => el("li", {}, inert(line)))) : null,
    commandButtons(graph.data.commands ?? []),
  );
}

/** Commands that may find what was not found here: a page from disk cannot run them, so buttons copy them. */
export function commandButtons(commands) {
  const copy = async (command, said) => {
    await navigator.clipboard?.writeText(command).catch(() => {});
    said.textContent = command;
  };
  const rows = commands.map(({ does, command }) => {
    const said = el("code", { role: "status" });
    return el("p", {}, el("button", { type: "button", onclick: () => copy(command, said) }, `Copy the command: ${does}`), " ", said);
  });
  return el("div", { class: "advice" }, ...rows);
}
