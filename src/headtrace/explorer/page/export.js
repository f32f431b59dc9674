// The view as a file: an SVG that carries its own style, and a PNG made from it.

import { svg } from "./dom.js";

const PROPERTIES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "visibility", "display", "vector-effect", "paint-order", "stroke-linejoin", "stroke-linecap"];

/** The chart as a stand-alone SVG: computed styles become attributes, what is hidden is left out. */
export function standalone(chart, title) {
  const original = chart.parts.root;
  const { width, height } = chart.viewport.view;
  const copy = original.cloneNode(true);
  const [from, to] = [[...original.querySelectorAll("*")], [...copy.querySelectorAll("*")]];
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    if (style.display === "none") return to[i].setAttribute("data-drop", "");
    if (element.tagName !== "title") {
      for (const name of PROPERTIES) {
        const value = style.getPropertyValue(name);
        if (value && !isDefault(name, value)) to[i].setAttribute(name, value);
      }
    }
    for (const name of ["class", "tabindex", "role", "data-id", "data-index", "data-position"]) to[i].removeAttribute(name);
  });
  for (const element of copy.querySelectorAll("[data-drop]")) element.remove();
  const ground = getComputedStyle(document.body).backgroundColor;
  copy.prepend(svg("title", {}, title), svg("rect", { width, height, fill: ground }));
  for (const name of ["class", "role", "aria-roledescription"]) copy.removeAttribute(name);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("font-family", getComputedStyle(original).fontFamily);
  return new XMLSerializer().serializeToString(copy);
}

function isDefault(name, value) {
  const usual = { "fill-opacity": "1", "stroke-opacity": "1", opacity: "1", stroke: "none", "stroke-dasharray": "none", visibility: "visible", display: "inline", "vector-effect": "none", "paint-order": "normal", "stroke-linejoin": "miter", "stroke-linecap": "butt", "text-anchor": "start", "font-weight": "400" };
  return usual[name] === value;
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
