// What every view can be taken along as: a link, lines of Python, files.

import { el, svg } from "../page/dom.js";
import { download } from "../page/export.js";
import { button, copy, menu } from "./pieces.js";

export function createShare(app) {
  const link = button("Copy link", () => copy(location.href, link), { title: "The address restores this view on this server" });
  const code = el("pre", { tabindex: 0, "aria-label": "Python" }, "");
  const copyCode = button("Copy", () => copy(code.textContent, copyCode));
  const files = el("div", { class: "files buttons" });
  const place = menu("share-menu", "Share", "as-button", link, el("p", { class: "hint" }, "Save:"), files, el("p", { class: "hint" }, "The same with the library:"), code, copyCode);
  place.addEventListener("toggle", () => place.open && update());

  function update() {
    const view = app.view();
    const lines = app.python();
    code.textContent = lines ?? "Nothing is computed here yet.";
    copyCode.hidden = !lines;
    files.replaceChildren(...entries(view));
  }

  function entries(view) {
    if (view.outdated?.()) return [el("p", { class: "hint" }, "Nothing is computed here yet.")];
    const name = view.name(app.state);
    const json = () => download(`${name}.json`, new Blob([JSON.stringify(view.json(), null, 1)], { type: "application/json" }));
    const job = view.job?.();
    const at = `/api/jobs/${encodeURIComponent(job)}`;
    const file = (label, href) => el("a", { href, download: "", class: "as-button" }, label);
    const drawing = app.drawing();
    const canvas = drawing ? null : view.canvas?.(app.state);
    const made = [
      view.json() && !job ? button("JSON", json) : null,
      job ? file(app.view().svg ? "Mechanism file (JSON)" : "Circuit file (JSON)", `${at}/circuit.json`) : null,
      ...(drawing ? [button("SVG", () => drawing("svg")), button("PNG", () => drawing("png"))] : []),
      ...(canvas ? [button("SVG", () => saveCanvasSvg(canvas, name)), button("PNG", () => saveCanvasPng(canvas, name))] : []),
      job ? file("HTML page", `${at}/page.html`) : null,
    ].filter(Boolean);
    return made.length ? made : [el("p", { class: "hint" }, "Nothing is computed here yet.")];
  }

  return { place, update };
}

/** The picture on its ground: a canvas alone is transparent. */
function onGround(canvas) {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  return copy;
}

async function saveCanvasPng(canvas, name) {
  const blob = await new Promise((resolve) => onGround(canvas).toBlob(resolve, "image/png"));
  download(`${name}.png`, blob);
}

function saveCanvasSvg(canvas, name) {
  const [width, height] = [canvas.width, canvas.height];
  const whole = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  whole.append(svg("title", {}, name), svg("image", { href: onGround(canvas).toDataURL("image/png"), width, height }));
  download(`${name}.svg`, new Blob([new XMLSerializer().serializeToString(whole)], { type: "image/svg+xml" }));
}

/** A drawing as it is on the screen, with its colours written out: outside of the page there are no variables. */
export async function saveDrawing(drawing, name, kind) {
  const copied = drawing.cloneNode(true);
  const [from, to] = [drawing, copied].map((each) => [each, ...each.querySelectorAll("*")]);
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const property of ["fill", "stroke", "color", "font-family", "font-size", "font-weight", "opacity"]) to[i].style.setProperty(property, style.getPropertyValue(property));
  });
  const { width, height } = drawing.viewBox.baseVal;
  for (const [attribute, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", width, height })) copied.setAttribute(attribute, value);
  const ground = svg("rect", { x: 0, y: 0, width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor });
  copied.insertBefore(ground, copied.firstChild);
  const blob = new Blob([new XMLSerializer().serializeToString(copied)], { type: "image/svg+xml" });
  if (kind === "svg") return download(`${name}.svg`, blob);
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  await image.decode();
  const canvas = el("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((png) => download(`${name}.png`, png), "image/png");
}
