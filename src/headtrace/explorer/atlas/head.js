// One head: its measures, and its channels side by side.

import { byId, el } from "./dom.js";
import { inert, number, percent, thousands, tokenLabel } from "./text.js";

export function showHead(data) {
  byId("question").textContent = data.name;
  byId("subtitle").textContent = `${inert(data.model)}, over ${thousands(data.tokens)} tokens of ${inert(data.corpus)}`;
  byId("ways").append(...ways(data));
  const measures = data.measures.flatMap(({ title, about, value }) => [el("dt", { title: about }, title), el("dd", {}, number(value))]);
  byId("main").append(
    el("p", { class: "roles" }, ...roles(data.roles)),
    el("dl", { class: "facts measures" }, ...measures),
    sharesChart(data.shares, new Set(data.channels.map((channel) => channel.number))),
    el("p", { class: "legend" }, "Of each channel, the pairs it scores highest: ", mark("source", "src"), " is attended to from ", mark("destination", "dest"), data.sinks ? "." : "; pairs whose source is the first token are left out.", " What stands out: in how many of its highest pairs, and how many times as often as in random pairs."),
    el("div", { class: "channels" }, ...data.channels.map(channel)),
  );
}

/** What the head does, as far as that has a name, with the measure that the name stands for. */
function roles(found) {
  if (found.length === 0) return ["None of the roles that have names fits what it does here."];
  return found.flatMap((role, place) => [place ? "; " : "", el("strong", {}, role.name), ` (${role.about}): ${number(role.score)}, by chance ${number(role.chance)}`]);
}

function ways(data) {
  const way = (name, words) => (name === null ? null : el("a", { class: "way", href: `${name}.html` }, words));
  return [el("a", { class: "way", href: "../index.html" }, "all heads"), way(data.before, "← " + (data.before ?? "")), way(data.after, (data.after ?? "") + " →")].filter(Boolean);
}

/** All channels' shares, those shown below marked. */
function sharesChart(shares, shown) {
  const highest = Math.max(...shares, 1e-12);
  const bars = shares.map((share, number_) => {
    const bar = el("span", { class: shown.has(number_) ? "column shown" : "column", title: `channel ${number_}: ${percent(share)}` });
    bar.style.height = `${(100 * share) / highest}%`;
    return bar;
  });
  return el("figure", { class: "shares" }, el("figcaption", {}, "Share of each channel in what the head attends by"), el("div", { class: "columns", role: "img", "aria-label": "Shares of the channels" }, ...bars));
}

function channel(found) {
  return el(
    "section",
    { class: "channel", "data-channel": found.number },
    el("h2", {}, `Channel ${found.number}`),
    el("p", { class: "kind" }, `${percent(found.share)} of the head; median score ${number(found.median)}, highest ${number(found.highest)}`),
    ...found.notes.map((note) => el("p", { class: "kind" }, inert(note))),
    el("h3", {}, "Stands out"),
    standing(found.relations.map((each) => ({ ...each, text: each.what })).concat(found.tokens.map((each) => ({ ...each, text: tokenLabel(each.what), token: true })))),
    el("h3", {}, "Highest pairs"),
    el("ol", { class: "pairs" }, ...found.pairs.map(pair)),
    el("h3", {}, "Reads through the embedding"),
    el("dl", { class: "facts" }, ...reads(found.reads)),
  );
}

function standing(found) {
  if (found.length === 0) return el("p", { class: "kind" }, "nothing");
  const item = (each) =>
    el("li", {}, each.side ? el("span", { class: `side ${each.side}` }, each.side === "dest" ? "from " : "to ") : null, el("span", { class: each.token ? "token" : "" }, inert(each.text)), el("span", { class: "weight" }, ` ${percent(each.share)}, ${number(each.ratio)}×`));
  return el("ul", { class: "standing" }, ...found.map(item));
}

function mark(content, side) {
  return el("mark", { class: side }, content);
}

function pair(one) {
  const words = one.tokens.flatMap((token, place) => {
    if (place !== one.src && place !== one.dest) return [inert(token)];
    const word = tokenLabel(token); // a mark does not begin with a blank, which could be alone at the end of a line
    const source = place === one.src ? mark(word, "src") : word;
    const space = token.trim() === "" ? [] : [token.slice(0, token.length - token.trimStart().length), token.slice(token.trimEnd().length)].map(inert);
    return [space[0] ?? "", place === one.dest ? mark(source, "dest") : source, space[1] ?? ""];
  });
  const cut = (yes) => (yes ? "… " : "");
  return el("li", {}, el("span", { class: "weight" }, number(one.score)), el("span", { class: "context" }, cut(one.cut), ...words));
}

function reads(found) {
  const tokens = (list) => list.map((token) => el("span", { class: "token" }, tokenLabel(token)));
  const names = [["from", found.query], ["to", found.key], ["or from", found.opposite_query], ["to", found.opposite_key]];
  return names.flatMap(([title, list]) => [el("dt", {}, title), el("dd", {}, ...tokens(list))]);
}
