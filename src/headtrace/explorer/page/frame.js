// What stands around the drawing of circuits: heading, search, filters, the stage and the panel beside it.

import { el } from "./dom.js";

const BUTTON = { type: "button" };

/**
 * Build the frame into a container and return a way to its parts by their ids. `level` is the tag of its heading,
 * `before` and `after` are what a page adds to the heading's line.
 */
export function createFrame(container, { level = "h1", before = [], after = [] } = {}) {
  container.classList.add("view");
  container.replaceChildren(headline(level, before, after), toolbar(), stage());
  if (!document.getElementById("card")) {
    document.body.append(el("div", { id: "card", role: "tooltip", hidden: true }), el("div", { id: "live", class: "unseen", "aria-live": "polite" }));
  }
  return (id) => container.querySelector(`#${id}`);
}

function headline(level, before, after) {
  const field = { type: "search", id: "search", placeholder: "Find L9H6, MLP 5, a token", autocomplete: "off", spellcheck: "false" };
  const save = (id, name) => el("button", { ...BUTTON, id, title: `Save the view as ${name}` }, name);
  return el(
    "header",
    { class: "top" },
    el("div", { class: "heading" }, el(level, { id: "question" }), el("p", { id: "subtitle" })),
    ...before,
    el(
      "div",
      { class: "search", id: "search-box" },
      el("input", { ...field, "aria-label": "Find a head, a component or a token" }),
      el("output", { id: "found", for: "search", "aria-live": "polite" }),
    ),
    el("div", { class: "buttons" }, el("span", { class: "buttons", id: "save" }, save("save-svg", "SVG"), save("save-png", "PNG")), ...after),
  );
}

function toolbar() {
  const group = (...content) => el("div", { class: "group" }, ...content);
  const slider = (id, label, attributes, value) =>
    group(
      el("label", { for: id }, label),
      el("input", { type: "range", id, min: 0, step: 1, ...attributes, "aria-describedby": `${id}-value` }),
      el("output", { id: `${id}-value`, for: id }, value),
    );
  const layer = (id, label) => el("input", { type: "number", id, min: 0, "aria-label": label });
  const matches = [["all", "all"], ["shared", "shared"], ["only", "exclusive"]].map(([value, label]) => el("option", { value }, label));
  return el(
    "details",
    { class: "toolbar", id: "toolbar", open: true },
    el("summary", {}, "Filters and legend"),
    el(
      "div",
      { class: "controls", role: "group", "aria-label": "Filters and legend" },
      el("fieldset", { class: "group switch", id: "paths", hidden: true }, el("legend", { class: "unseen" }, "Paths that are shown")),
      el("div", { class: "group chips", id: "sides", role: "group", "aria-label": "Sides" }),
      el("div", { class: "group chips", id: "kinds", role: "group", "aria-label": "Kinds of component" }),
      slider("detail", "Detail", { max: 1000 }, ""),
      slider("weight", "Weight", { max: 100, value: 0 }, "any"),
      group(el("span", {}, "Layers"), layer("layer-low", "From layer"), " – ", layer("layer-high", "To layer")),
      el("div", { class: "group", id: "match-control", hidden: true }, el("label", { for: "match" }, "Edges"), el("select", { id: "match" }, ...matches)),
      el("div", { class: "group chips", id: "words", hidden: true }),
      el("p", { class: "legend", id: "legend", hidden: true }),
    ),
  );
}

function stage() {
  const zoom = (id, label, text) => el("button", { ...BUTTON, id, "aria-label": label }, text);
  const effects = [el("span", { class: "measured", "aria-hidden": "true" }, "−0.3"), " ", el("span", { id: "effects-words" })];
  return el(
    "div",
    { class: "view-body" },
    el(
      "div",
      { class: "stage" },
      el(
        "div",
        { class: "stage-bar", id: "stage-bar" },
        el("div", { class: "zoom", role: "group", "aria-label": "Zoom" }, zoom("closer", "Zoom in", "+"), zoom("farther", "Zoom out", "−"), zoom("fit", "Fit to the window", "fit")),
        el("p", { id: "status", role: "status" }),
        el("button", { ...BUTTON, id: "fold-all", hidden: true }),
        el("p", { id: "effects", hidden: true }, ...effects),
      ),
      el("div", { id: "charts" }),
    ),
    el("aside", { id: "panel", "aria-label": "Details" }),
  );
}
