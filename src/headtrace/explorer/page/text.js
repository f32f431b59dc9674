// Text as a person reads it: tokens, numbers, components. Everything returned is plain text, never markup.

const SPECIAL = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣" };

// Control characters, fillers and direction overrides would be invisible or would turn their neighbours around.
const INVISIBLE =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e0fff}]/gu;
// Marks piled on a letter would reach into the lines above and below.
const PILE = /(\p{M}{3})\p{M}+/gu;
// A letter with its marks, or several joined into one picture: what must not be cut in two.
const LETTERS = /\P{M}\p{M}*(?:\u200d\P{M}\p{M}*)*|\p{M}+/gu;

/** Text as it is, with what cannot be seen, or would act on the text around it, made visible. */
export function inert(text) {
  const escaped = (c) => SPECIAL[c] ?? `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  return text.replace(INVISIBLE, escaped).replace(PILE, "$1");
}

/** The same for a whole text, which keeps its lines. */
export function inertLines(text) {
  return text.split("\n").map(inert).join("⏎\n");
}

/** Which way a text runs, by its first letter: an element whose text is in parts of its own cannot find out (dir="auto"). */
export function direction(text) {
  const first = /\p{L}/u.exec(text)?.[0] ?? "";
  return /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(first) ? "rtl" : "ltr";
}

/** A token for a label: its outer space dropped, whitespace and control characters made visible. */
export function tokenLabel(token) {
  const core = token.trim();
  if (core !== "") return inert(core);
  if (token === "") return "∅";
  const marks = [...token].map((c) => SPECIAL[c] ?? inert(c));
  return marks.length > 4 && marks.every((mark) => mark === marks[0]) ? `${marks[0]}×${marks.length}` : marks.join("");
}

const EXACT = 120;

/** A token exactly, in quotes, for details; of a very long one its beginning and its length. */
export function tokenExact(token) {
  const length = [...token].length;
  return length <= EXACT ? `“${inert(token)}”` : `“${shorten(inert(token), EXACT)}” (${thousands(length)} characters)`;
}

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6\u{1f000}-\u{3fffd}]/u;
const letterWidth = (letter) => (WIDE.test(letter) ? 17 : 10.4);

/** About how wide a text is in the letters of the root. */
export function widthOf(text) {
  return (text.match(LETTERS) ?? []).reduce((width, letter) => width + letterWidth(letter), 0);
}

/** As much of a text as fits into a width. */
export function fitting(text, width) {
  const letters = text.match(LETTERS) ?? [];
  let taken = 0;
  const fits = letters.findIndex((letter) => (taken += letterWidth(letter)) > width);
  return fits < 0 ? text : shorten(text, fits);
}

export function shorten(text, length) {
  const letters = text.match(LETTERS) ?? [];
  return letters.length <= length ? text : letters.slice(0, Math.max(0, length - 1)).join("") + "…";
}

/** Three significant digits, a real minus sign. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  const text = size < 0.0001 ? value.toExponential(1) : value.toFixed(digits);
  return text.replace("-", "−");
}

/** A p-value: two digits, or a power of ten. */
export function pValue(value) {
  return value >= 0.001 || value === 0 ? String(Number(value.toPrecision(2))) : value.toExponential(0).replace("-", "−");
}

/** A number whose sign says for or against. */
export function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}

/** A number where there is little room: two digits or so. */
export function brief(value) {
  const size = Math.abs(value);
  if (size > 0 && size < 0.005) return "≈0";
  return value.toFixed(size >= 10 ? 0 : size >= 1 ? 1 : 2).replace("-", "−");
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? "<0.1%" : `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)}%`.replace("-", "−");
}

/** 12345 as 12,345; toLocaleString would do it too, but takes a tenth of a second to wake up. */
export function thousands(count) {
  return String(count).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function plural(count, one, many = `${one}s`) {
  return `${thousands(count)} ${count === 1 ? one : many}`;
}

/** What is written on an MLP: its layer, or the first and last of those that are folded into one. */
export function mlpLabel({ layer, members }) {
  return members ? `MLPs ${members.first}-${members.last}` : String(layer);
}

/** What a component is called, without its place, which is the last word of its name: L9H6 of L9H6 14->3. */
export function componentName(node) {
  return node.name.replace(/ \S+$/, "");
}
