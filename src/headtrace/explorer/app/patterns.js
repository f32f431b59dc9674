// Attention of all heads, as it travels: one byte per weight, of each destination its sources up to itself.

export class Patterns {
  constructor(bytes, heads, tokens) {
    Object.assign(this, { bytes, heads, tokens, each: (tokens * (tokens + 1)) / 2 });
  }

  /** Where the weights of one head begin. */
  start(layer, head) {
    return (layer * this.heads + head) * this.each;
  }
}

/**
 * One head as a square of at most `most` pixels, in colours of a table. Where there are more tokens than pixels, the
 * strongest attention within a pixel is shown. `values(index)` is the place in the table of one weight.
 */
export function picture(patterns, start, most, values, table, withoutFirst = false) {
  const { tokens } = patterns;
  const side = Math.min(tokens, most);
  const found = new Int16Array(side * side).fill(-1);
  const middle = (table.length >> 2) >> 1;
  const signed = table.length > 4 * 256;
  let index = start;
  for (let dest = 0; dest < tokens; dest++) {
    const row = Math.floor((dest * side) / tokens) * side;
    for (let src = 0; src <= dest; src++, index++) {
      if (withoutFirst && src === 0) continue;
      const at = row + Math.floor((src * side) / tokens);
      const value = values(index);
      const [size, known] = signed ? [Math.abs(value - middle), Math.abs(found[at] - middle)] : [value, found[at]];
      if (found[at] < 0 || size > known) found[at] = value;
    }
  }
  const image = new ImageData(side, side);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = new Uint32Array(table.buffer);
  for (let i = 0; i < found.length; i++) if (found[i] >= 0) pixels[i] = colours[found[i]];
  return image;
}
