// Building elements. Text goes in as text nodes only, so nothing in a prompt or a description can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

const round = (value) => Math.round(value * 10) / 10;

export function pathOf(c) {
  const at = (x, y) => `${round(x)},${round(y)}`;
  return `M${at(c.x0, c.y0)}C${at(c.x1, c.y1)} ${at(c.x2, c.y2)} ${at(c.x3, c.y3)}`;
}
