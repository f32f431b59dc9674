// Colours for attention, made from those of the theme: nothing, some, all; and less, as before, more.

/** The colours that the theme gives now. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  const names = ["ground", "surface", "ink", "muted", "line", "band", "focus", "none", "some", "all", "less", "more"];
  return Object.fromEntries(names.map((name) => [name, named(`--${name}`)]));
}

function parts(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function mixed(from, to, share) {
  return parts(from).map((part, i) => part + (parts(to)[i] - part) * share);
}

/** A colour for a share from 0 to 1: its square root counts, so that weak attention is seen too. */
export function shade({ none, some, all }, share) {
  const level = Math.sqrt(Math.max(0, Math.min(1, share)));
  return level < 0.5 ? mixed(none, some, 2 * level) : mixed(some, all, 2 * level - 1);
}

/** A colour for a change from -1 to 1. */
export function shadeChange({ none, less, more }, change) {
  return mixed(none, change < 0 ? less : more, Math.sqrt(Math.min(1, Math.abs(change))));
}

/** Both as tables: 256 colours, or 511 with no change in the middle. */
export function tableOf(colours, changes = false) {
  const size = changes ? 511 : 256;
  const table = new Uint8ClampedArray(4 * size);
  for (let i = 0; i < size; i++) {
    table.set([...(changes ? shadeChange(colours, (i - 255) / 255) : shade(colours, i / 255)), 255], 4 * i);
  }
  return table;
}

export function css(rgb) {
  return `rgb(${rgb.map(Math.round).join(" ")})`;
}
