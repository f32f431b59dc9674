// Pointer and keyboard: hover, pin, pan, zoom, and walking along edges with the arrow keys.

import { byId } from "./dom.js";
import { describeNode } from "./drawing.js";
import { edgeCard, nodeCard, skippedCard, tokenCard } from "./details.js";

/** Make a chart answer. `app` has press(chart, id), pin(chart, id, edge) and hover(chart, target). */
export function makeInteractive(chart, app) {
  const surface = chart.parts.chart;
  let drag = null;
  let pending = null;
  let read = null; // what was clicked: the panel says more of it than its card would, and the card stays away

  const place = (event) => {
    const box = surface.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  function targetOf(event) {
    const group = event.target.closest?.(".node");
    if (group) return { node: Number(group.dataset.id) };
    const words = event.target.closest?.(".word");
    if (words) return { edge: Number(words.dataset.index), words: true };
    const [x, y] = place(event);
    const column = chart.viewport.columnAt(x, y);
    if (column !== null) return { column };
    const skipped = chart.viewport.skippedAt(x, y);
    if (skipped !== null) return { skipped };
    if (!chart.viewport.inside(x, y)) return null;
    const edge = chart.edgeAt(x, y);
    return edge === null ? null : { edge };
  }

  surface.addEventListener("pointermove", (event) => {
    if (drag) return dragBy(event);
    const first = pending === null;
    pending = event;
    if (first) {
      requestAnimationFrame(() => {
        const latest = pending;
        pending = null;
        if (!latest || !surface.isConnected) return; // the pointer has left since, or it was drawn anew
        const target = targetOf(latest);
        app.hover(chart, target && ("node" in target || "edge" in target) ? target : null);
        if (target && targetName(target) === read) return;
        read = null;
        showCard(chart, target, latest.clientX, latest.clientY);
      });
    }
  });
  surface.addEventListener("pointerleave", () => {
    read = pending = null;
    app.hover(chart, null);
    hideCard();
  });

  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { x: event.clientX, y: event.clientY, far: false, pointer: event.pointerId };
  });
  function dragBy(event) {
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.far && Math.hypot(dx, dy) < 5) return;
    if (!drag.far) surface.setPointerCapture(drag.pointer);
    drag = { ...drag, x: event.clientX, y: event.clientY, far: true };
    surface.classList.add("dragging");
    hideCard();
    chart.viewport.pan(dx, dy);
  }
  surface.addEventListener("pointerup", (event) => {
    const moved = drag?.far;
    drag = null;
    surface.classList.remove("dragging");
    if (moved) return;
    const target = targetOf(event);
    read = targetName(target);
    hideCard();
    if (target?.node !== undefined) app.press(chart, target.node);
    else if (target?.edge !== undefined) {
      const edge = chart.graph.edges[target.edge];
      app.pin(chart, target.words ? edge.target : edge.source, target.edge); // words are about what the target looks for
    }
    else app.pin(chart, null);
  });
  surface.addEventListener("pointercancel", () => (drag = null));

  surface.addEventListener("wheel", (event) => {
    const [x, y] = place(event);
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      chart.viewport.zoom(Math.exp(-event.deltaY * 0.004), x, y);
    } else if (chart.viewport.view.moved) {
      event.preventDefault();
      chart.viewport.pan(-event.deltaX, -event.deltaY);
    }
  }, { passive: false });

  surface.addEventListener("focusin", (event) => {
    const group = event.target.closest(".node");
    if (!group) return;
    const id = Number(group.dataset.id);
    for (const other of chart.parts.nodes.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    group.setAttribute("tabindex", "0");
    if (group.matches(":focus-visible")) {
      chart.viewport.reveal(chart.geometry.nodes.get(id));
      app.hover(chart, { node: id });
      byId("live").textContent = describeNode(chart.graph, chart.graph.nodes.get(id));
    }
  });
  surface.addEventListener("focusout", () => app.hover(chart, null));
  surface.addEventListener("keydown", (event) => onKey(chart, app, event));
}

function onKey(chart, app, event) {
  const group = event.target.closest(".node");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const id = group ? Number(group.dataset.id) : null;
  const actions = {
    ArrowUp: () => go(chart, strongest(chart, id, "from", "target")),
    ArrowDown: () => go(chart, strongest(chart, id, "into", "source")),
    ArrowLeft: () => go(chart, neighbour(chart, id, -1)),
    ArrowRight: () => go(chart, neighbour(chart, id, 1)),
    Enter: () => app.press(chart, id),
    " ": () => app.press(chart, id),
    Escape: () => app.pin(chart, null),
    "+": () => chart.viewport.zoom(1.25),
    "=": () => chart.viewport.zoom(1.25),
    "-": () => chart.viewport.zoom(0.8),
    0: () => chart.viewport.fit(),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

function strongest(chart, id, list, end) {
  if (id === null) return chart.graph.root?.id;
  const seen = chart.graph.nodes.get(id)[list].filter(chart.passes);
  return seen.map((edge) => edge[end]).find((other) => chart.drawn.nodes.has(other));
}

/** The next node to the left or right among the causes of the same target, or else in reading order. */
function neighbour(chart, id, step) {
  if (id === null) return chart.graph.root?.id;
  const target = chart.graph.nodes.get(id).from.find(chart.passes)?.target;
  const into = target === undefined ? [] : chart.graph.nodes.get(target).into.filter(chart.passes);
  const causes = into.map((edge) => edge.source);
  const here = [...new Set([...causes, id])].filter((other) => chart.drawn.nodes.has(other));
  return here[(here.indexOf(id) + step + here.length) % here.length];
}

function go(chart, id) {
  if (id !== undefined) chart.drawn.nodes.get(id)?.focus({ focusVisible: true, preventScroll: true });
}

const targetName = (target) => (target ? JSON.stringify(target) : null);

export function showCard(chart, target, x, y) {
  if (!target) return hideCard();
  const { graph, parts } = chart;
  const [pointer, around] = [new DOMRect(x - 10, y - 10, 20, 20), []];
  let [content, what] = [null, pointer];
  const box = (id) => chart.drawn.nodes.get(id)?.getBoundingClientRect();
  if (target.node !== undefined) {
    content = nodeCard(graph, graph.nodes.get(target.node));
    what = box(target.node) ?? pointer;
  } else if (target.edge !== undefined) {
    const edge = graph.edges[target.edge];
    content = edgeCard(graph, edge);
    around.push(box(edge.source), box(edge.target));
  } else if (target.skipped !== undefined) content = skippedCard(target.skipped);
  else {
    content = tokenCard(graph, target.column);
    what = parts.chart.querySelector(`.axis-token[data-position="${target.column}"]`)?.getBoundingClientRect() ?? pointer;
  }
  placeCard(content, what, around.filter(Boolean));
}

const [GAP, EDGE] = [12, 8]; // pixels between a card and what it explains, and the window's edge

/**
 * Put a card beside what it explains, a box of the window: never over it, nor, where there is another place, over what
 * stands `around`.
 */
export function placeCard(content, what, around = []) {
  const card = byId("card");
  card.style.maxHeight = "";
  card.replaceChildren(...content.filter(Boolean));
  card.hidden = false;
  const [w, h] = [card.offsetWidth, card.offsetHeight];
  const [across, down] = [Math.min(what.left, innerWidth - w - EDGE), Math.min(what.top, innerHeight - h - EDGE)].map((way) => Math.max(EDGE, way));
  const places = [[what.right + GAP, down], [what.left - GAP - w, down], [across, what.bottom + GAP], [across, what.top - GAP - h]];
  const fits = places.filter(([x, y]) => x >= EDGE && y >= EDGE && x + w <= innerWidth - EDGE && y + h <= innerHeight - EDGE);
  const free = fits.find((place) => !around.some((other) => overlaps(other, place, w, h)));
  let [x, y] = free ?? fits[0] ?? [across, what.bottom + GAP];
  if (!fits.length) {
    // Too large for any side: where there is more room, cut to it.
    const [above, below] = [what.top, innerHeight - what.bottom].map((room) => Math.max(0, room - GAP - EDGE));
    if (above > below) y = what.top - GAP - Math.min(h, above);
    card.style.maxHeight = `${Math.max(above, below)}px`;
  }
  [card.style.left, card.style.top] = [`${x}px`, `${y}px`];
}

const overlaps = (other, [x, y], w, h) => x < other.right && x + w > other.left && y < other.bottom && y + h > other.top;

export function hideCard() {
  byId("card").hidden = true;
}
