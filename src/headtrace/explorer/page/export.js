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
  "font-style": "normal",
  "text-anchor": "start",
  "paint-order": "normal",
};
const DIMMED = 0.2;
const OURS = ["class", "tabindex", "role", "data-id", "data-index", "data-position"];

/** The chart as a stand-alone SVG: its layers in one, computed styles as attributes, what is hidden left out. */
export function standalone(chart, title) {
  const { width, height } = chart.viewport.view;
  const whole = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  whole.setAttribute("font-family", getComputedStyle(chart.parts.chart).fontFamily);
  const ground = getComputedStyle(document.body).backgroundColor;
  whole.append(svg("title", {}, title), svg("rect", { width, height, fill: ground }));
  for (const layer of chart.parts.layers) {
    // Not the computed opacity: it may be on its way from one value to the other.
    const dimmed = layer === chart.parts.chart && chart.host.classList.contains("focusing");
    const group = svg("g", { opacity: dimmed ? DIMMED : null });
    group.append(...[...layer.children].map((child) => styledCopy(child, chart.viewport.view.scale)));
    whole.append(group);
  }
  whole.append(heading(chart, title));
  return new XMLSerializer().serializeToString(whole);
}

/** What the picture shows, and which line is which: it will be seen without the page around it. */
function heading(chart, title) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const group = svg("g", { fill: colour("--ink") });
  group.append(svg("text", { x: 48, y: 26, "font-size": 14, "font-weight": 650 }, title));
  const chips = [...document.querySelectorAll("#sides .chip:enabled")];
  const opposing = chart.parts.edges.querySelector(".opposing") ? document.querySelectorAll('#legend [data-name="opposing"]') : [];
  [...chips, ...opposing].forEach((chip, i) => {
    const x = 48 + 80 * i;
    const { stroke, strokeDasharray } = getComputedStyle(chip.querySelector(".edge"));
    group.append(svg("line", { x1: x, x2: x + 26, y1: 42, y2: 42, stroke, "stroke-width": 2.5, "stroke-dasharray": strokeDasharray }));
    group.append(svg("text", { x: x + 32, y: 46, "font-size": 12 }, chip.textContent));
  });
  return group;
}

function styledCopy(original, scale) {
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
      if (style.vectorEffect === "non-scaling-stroke") fixWidth(to[i], style, scale);
    }
    for (const name of OURS) to[i].removeAttribute(name);
  });
  for (const element of copy.querySelectorAll("[data-drop]")) element.remove();
  return copy;
}

/** Widths in pixels of the screen become widths of the drawing, so that they hold at any size of the picture. */
function fixWidth(element, style, scale) {
  element.setAttribute("stroke-width", parseFloat(style.strokeWidth) / scale);
  if (style.strokeDasharray === "none") return;
  const dashes = style.strokeDasharray.split(",").map((length) => parseFloat(length) / scale);
  element.setAttribute("stroke-dasharray", dashes.join());
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
  await downloadPng(name, standalone(chart, title), width, height);
}

/** SVG text as a PNG of twice its size. */
export async function downloadPng(name, text, width, height) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  download(`${name}.png`, blob);
}
