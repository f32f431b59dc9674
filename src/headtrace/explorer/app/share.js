// What every view can be taken along as: a link, lines of Python, files.

import { el, svg } from "../page/dom.js";
import { download } from "../page/export.js";
import { button, copy } from "./pieces.js";

export function createShare(app) {
  const link = button("Copy link", () => copy(location.href, link), { title: "The address restores this view on this server" });
  const code = el("pre", {}, "");
  const copyCode = button("Copy", () => copy(code.textContent, copyCode));
  const python = el("details", { class: "menu python" }, el("summary", { class: "as-button" }, "Python"), el("div", { class: "menu-body" }, el("p", { class: "hint" }, "The same with the library:"), code, copyCode));
  const files = el("div", { class: "menu-body files" });
  const save = el("details", { class: "menu" }, el("summary", { class: "as-button" }, "Save"), files);
  const place = el("div", { class: "buttons" }, link, python, save);

  for (const menu of [python, save]) {
    menu.addEventListener("toggle", () => menu.open && update());
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      menu.open = false;
      menu.firstChild.focus();
    });
    document.addEventListener("pointerdown", (event) => menu.contains(event.target) || (menu.open = false));
  }

  function update() {
    const view = app.view();
    const lines = app.python();
    code.textContent = lines ?? "Nothing is computed here yet.";
    copyCode.hidden = !lines;
    files.replaceChildren(...entries(view));
  }

  function entries(view) {
    const name = view.name(app.state);
    const json = () => download(`${name}.json`, new Blob([JSON.stringify(view.json(), null, 1)], { type: "application/json" }));
    const job = view.job?.();
    const at = `/api/jobs/${encodeURIComponent(job)}`;
    const file = (label, href) => el("a", { href, download: "", class: "as-button" }, label);
    const drawing = app.drawing();
    const canvas = drawing ? null : view.canvas?.(app.state);
    const made = [
      view.json() && !job ? button("JSON", json) : null,
      job ? file("Circuit file (JSON)", `${at}/circuit.json`) : null,
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
