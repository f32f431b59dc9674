// Small pieces that several views are made of.

import { el } from "../page/dom.js";
import { inert, tokenExact } from "../page/text.js";

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

/** A token, as text that cannot act on its surroundings. */
export function token(text) {
  return el("bdi", { class: "token" }, tokenExact(text));
}

/** One of a few, as a switch of radio buttons. */
export function choice(name, legend, options, value, changed) {
  const labels = options.map(([key, label]) => {
    const input = el("input", { type: "radio", name, value: key, checked: key === value, onchange: () => changed(key) });
    return el("label", {}, input, label);
  });
  const group = el("fieldset", { class: "group switch" }, el("legend", { class: "unseen" }, legend), ...labels);
  const set = (now) => group.querySelectorAll("input").forEach((input) => (input.checked = input.value === now));
  return { group, set };
}

export function select(label, options, value, changed) {
  const field = el("select", { onchange: () => changed(field.value) }, ...options.map(([key, text]) => el("option", { value: key }, text)));
  field.value = value;
  return { group: el("label", { class: "group" }, label, " ", field), field };
}

/** A bar of a share from 0 to 1. */
export function bar(share, look = "") {
  const made = el("span", { class: `share ${look}`, "aria-hidden": "true" }, el("span", {}));
  made.firstChild.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return made;
}

/**
 * A place for what a view has to say: that it works, or what went wrong. What is wrong with the prompt is said at the
 * prompt (`ofPrompt`), and nowhere else.
 */
export function notice({ ofPrompt = false } = {}) {
  const place = el("p", { class: "notice", role: "status", hidden: true });
  const say = (words, look) => {
    place.hidden = !words;
    place.className = `notice ${look}`;
    place.textContent = words ? inert(words) : "";
  };
  return { place, busy: (words) => say(words, "busy"), failed: (error) => say(error.ofPrompt && !ofPrompt ? "" : (error.message ?? String(error)), "failed"), clear: () => say("", "") };
}

/** Text in a field, where a space at the beginning can be seen. */
export const shown = (text) => (text ?? "").replace(/^ /, "␣");
export const meant = (text) => text.replace(/^␣/, " ");

/** What opens below a word of the heading, over what stands there; a click elsewhere or Escape closes it. */
export function menu(name, label, look, ...inside) {
  const place = el("details", { class: `menu ${name}` }, el("summary", { class: look }, label), el("div", { class: "menu-body" }, ...inside));
  place.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    place.open = false;
    place.firstChild.focus();
  });
  document.addEventListener("pointerdown", (event) => place.contains(event.target) || (place.open = false));
  return place;
}

/** Copy text, and say so on the button. */
export async function copy(text, from) {
  const label = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Press Ctrl+C";
    getSelection().selectAllChildren(from.closest("details, div")?.querySelector("pre") ?? from);
  }
  setTimeout(() => (from.textContent = label), 1500);
}

/** Run once a little after the last time it was asked for. */
export function afterwards(milliseconds, run) {
  let timer = 0;
  const later = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...given), milliseconds);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

/** Words with tokens between stars, as the library writes them: the tokens in quotation marks. */
export function quotedStars(words) {
  return inert(words).split("*").map((part, i) => (i % 2 ? `\u201c${part}\u201d` : part)).join("");
}
