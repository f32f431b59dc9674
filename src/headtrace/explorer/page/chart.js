// One circuit on the screen: puts layout, drawing and viewport together, and lights up what is looked at.

import { draw, emptyChart, extraPath } from "./drawing.js";
import { filterEdges, wayToRoot } from "./graph.js";
import { layout, pointOn } from "./layout.js";
import { createViewport } from "./viewport.js";

const SAMPLES = [0.04, 0.14, 0.24, 0.34, 0.44, 0.54, 0.64, 0.74, 0.84, 0.94];

export function createChart(host, graph, label) {
  const parts = emptyChart(label);
  host.replaceChildren(parts.root);
  const viewport = createViewport(parts);
  const chart = { host, graph, parts, viewport, geometry: null, drawn: null, filters: null, pinned: null, samples: [] };
  let lit = [];

  /** Take the size of the host; true if its shape is so different that the layout should be made anew. */
  chart.resize = () => {
    viewport.resize(Math.max(200, host.clientWidth), Math.max(200, host.clientHeight));
    const [width, height] = viewport.room(graph.tokens);
    return chart.filters !== null && Math.abs(Math.log(width / height / chart.aspect)) > 0.04;
  };

  /** Draw what the filters let through; resolves once everything is on the page. */
  chart.show = (filters) => {
    chart.filters = filters;
    const selection = filterEdges(graph, filters);
    if (chart.drawn) chart.drawn.cancelled = true;
    chart.selection = selection;
    const [width, height] = viewport.room(graph.tokens);
    chart.aspect = width / height;
    chart.geometry = layout(graph, selection, [width, height]);
    chart.samples = sampleEdges(chart.geometry);
    viewport.show(graph, chart.geometry, true);
    host.setAttribute("aria-busy", "true");
    return new Promise((resolve) => {
      chart.drawn = draw(parts, graph, chart.geometry, (drawn) => {
        chart.drawn = drawn;
        host.setAttribute("aria-busy", "false");
        if (chart.pinned !== null && !chart.drawn.nodes.has(chart.pinned)) chart.pinned = null;
        chart.light(null);
        makeReachable();
        resolve();
      });
    });
  };

  /** One node at a time is in the tab order; arrow keys lead to the others. */
  function makeReachable() {
    const first = chart.pinned ?? graph.root?.id ?? chart.drawn.nodes.keys().next().value;
    chart.drawn.nodes.get(first)?.setAttribute("tabindex", "0");
  }

  /** Light up what is hovered, or else what is pinned: its edges, the nodes at their ends, its way to the root. */
  chart.light = (hovered) => {
    for (const element of lit) element.classList.remove("on", "near", "self");
    lit = [];
    parts.extra.replaceChildren();
    const target = hovered ?? (chart.pinned === null ? null : { node: chart.pinned });
    parts.root.classList.toggle("focusing", target !== null && (chart.pinned !== null || target.node !== undefined));
    parts.root.classList.toggle("pinned", chart.pinned !== null);
    if (!target) return;
    const node = target.node === undefined ? null : graph.nodes.get(target.node);
    const edges = node ? [...node.into, ...node.from].filter(passes) : [graph.edges[target.edge]];
    for (const edge of edges) {
      if (!mark(chart.drawn.edges.get(edge.index), "on")) {
        const path = extraPath(graph, chart.geometry, edge);
        if (path) parts.extra.append(path);
      }
      mark(chart.drawn.nodes.get(edge.source), "on");
      mark(chart.drawn.nodes.get(edge.target), "on");
    }
    if (!node) return;
    mark(chart.drawn.nodes.get(node.id), "self");
    mark(chart.drawn.nodes.get(node.id), "on");
    mark(chart.drawn.sources.get(node.id), "on");
    for (const edge of wayToRoot(graph, node.id)) {
      mark(chart.drawn.edges.get(edge.index), "near");
      mark(chart.drawn.nodes.get(edge.target), "near");
    }
  };

  function passes(edge) {
    return chart.geometry.nodes.has(edge.source) && chart.geometry.nodes.has(edge.target) && chart.filters.sides[edge.side];
  }

  function mark(element, name) {
    if (!element) return false;
    element.classList.add(name);
    lit.push(element);
    return true;
  }

  /** The drawn edge nearest to a point of the screen, if it is within reach. */
  chart.edgeAt = (x, y) => {
    const [wx, wy] = viewport.toWorld(x, y);
    const reach = 9 / viewport.view.scale;
    let best = null;
    let nearest = reach * reach;
    for (const sample of chart.samples) {
      if (wx < sample.box[0] - reach || wx > sample.box[2] + reach || wy < sample.box[1] - reach || wy > sample.box[3] + reach) continue;
      const distance = distanceTo(sample.points, wx, wy);
      if (distance < nearest) [nearest, best] = [distance, sample.index];
    }
    return best;
  };

  chart.matches = (found) => {
    for (const [id, element] of chart.drawn.nodes) element.classList.toggle("found", found.has(id));
  };
  return chart;
}

function sampleEdges(geometry) {
  return geometry.edges.map((place) => {
    const points = [[place.x0, place.y0], ...SAMPLES.map((t) => pointOn(place, t)), [place.x3, place.y3]];
    const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
    return { index: place.index, points, box: [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)] };
  });
}

/** Squared distance from a point to a line of short segments. */
function distanceTo(points, x, y) {
  let least = Infinity;
  for (let i = 1; i < points.length; i++) {
    const [[ax, ay], [bx, by]] = [points[i - 1], points[i]];
    const [dx, dy] = [bx - ax, by - ay];
    const length = dx * dx + dy * dy || 1;
    const t = Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / length));
    const [ex, ey] = [x - ax - t * dx, y - ay - t * dy];
    least = Math.min(least, ex * ex + ey * ey);
  }
  return least;
}
