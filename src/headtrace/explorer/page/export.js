// The view as a file: an SVG that carries its own style, and a PNG made from it.

import { svg } from "./dom.js";

// What a drawing needs of its style, with the values that need not be written down.
const PROPERTIES = {
  fill: null,
  "fill-opacity": "1",
  stroke: "none",
  "stroke-width": null,
  "stroke-opacity": "1",
  "stroke-dasharray": "none",
  "stroke-linejoin": "miter",
  "stroke-linecap": "butt",
  opacity: "1",
  "font-size": null,
  "font-weight": "400",
  "text-anchor": "start",
  "vector-effect": "none",
  "paint-order": "normal",
};
const OURS = ["class", "tabindex", "role", "data-id", "data-index", "data-position"];

/** The chart as a stand-alone SVG: its layers in one, computed styles as attributes, what is hidden left out. */
export function standalone(chart, title) {
  const { width, height } = chart.viewport.view;
  const whole = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  whole.setAttribute("font-family", getComputedStyle(chart.parts.chart).fontFamily);
  const ground = getComputedStyle(document.body).backgroundColor;
  whole.append(svg("title", {}, title), svg("rect", { width, height, fill: ground }));
  for (const layer of chart.parts.layers) {
    const group = svg("g", { opacity: getComputedStyle(layer).opacity });
    group.append(...[...layer.children].map(styledCopy));
    whole.append(group);
  }
  return new XMLSerializer().serializeToString(whole);
}

function styledCopy(original) {
  const copy = original.cloneNode(true);
  const [from, to] = [[original, ...original.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    if (style.display === "none") return to[i].setAttribute("data-drop", "");
    if (element.tagName !== "title") {
      for (const [name, usual] of Object.entries(PROPERTIES)) {
        const value = style.getPropertyValue(name);
        if (value && value !== usual) to[i].setAttribute(name, value);
      }
    }
    for (const name of OURS) to[i].removeAttribute(name);
  });
  for (const element of copy.querySelectorAll("[data-drop]")) element.remove();
  return copy;
}

export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveSvg(chart, title, name) {
  download(`${name}.svg`, new Blob([standalone(chart, title)], { type: "image/svg+xml" }));
}

/** A PNG of the view at twice its size on the screen. */
export async function savePng(chart, title, name) {
  const { width, height } = chart.viewport.view;
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([standalone(chart, title)], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  download(`${name}.png`, blob);
}
