// Text as a person reads it: tokens, numbers, components. Everything returned is plain text, never markup.

const SPECIAL = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣" };

// Control characters and direction overrides would be invisible or would turn their neighbours around.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;

function visible(text) {
  return text.replace(INVISIBLE, (c) => SPECIAL[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** A token for a label: its outer space dropped, whitespace and control characters made visible. */
export function tokenLabel(token) {
  const core = token.trim();
  if (core !== "") return visible(core);
  return token === "" ? "∅" : [...token].map((c) => SPECIAL[c] ?? visible(c)).join("");
}

/** A token exactly, in quotes, for details. */
export function tokenExact(token) {
  return `“${visible(token)}”`;
}

export function shorten(text, length) {
  const letters = [...text];
  return letters.length <= length ? text : letters.slice(0, length - 1).join("") + "…";
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

/** A number where there is little room: two digits or so. */
export function brief(value) {
  const size = Math.abs(value);
  if (size > 0 && size < 0.005) return "≈0";
  return value.toFixed(size >= 10 ? 0 : size >= 1 ? 1 : 2).replace("-", "−");
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? "<0.1%" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`;
}

/** 12345 as 12,345; toLocaleString would do it too, but takes a tenth of a second to wake up. */
export function thousands(count) {
  return String(count).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function plural(count, one, many = `${one}s`) {
  return `${thousands(count)} ${count === 1 ? one : many}`;
}

/** What a component is called, without its place, which is the last word of its name: L9H6 of L9H6 14->3. */
export function componentName(node) {
  return node.name.replace(/ \S+$/, "");
}
