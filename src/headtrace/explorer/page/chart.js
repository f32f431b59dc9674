// One circuit on the screen: puts layout, drawing and viewport together, and lights up what is looked at.

import { draw, emptyChart, litParts } from "./drawing.js";
import { filterEdges, sideShown, wayToRoot } from "./graph.js";
import { layout, placeEdge, pointOn } from "./layout.js";
import { createViewport } from "./viewport.js";

const SAMPLES = [0.04, 0.14, 0.24, 0.34, 0.44, 0.54, 0.64, 0.74, 0.84, 0.94];

export function createChart(host, graph, label) {
  const parts = emptyChart(label);
  host.replaceChildren(...parts.layers);
  const viewport = createViewport(host, parts);
  const chart = { host, graph, parts, viewport, geometry: null, drawn: null, filters: null, pinned: null, samples: null, labelled: [graph] };

  let pressed;

  /** Take the size of the host; true if its shape is so different, or names so small, that the layout should be made anew. */
  chart.resize = () => {
    viewport.resize(Math.max(200, host.clientWidth), Math.max(200, host.clientHeight));
    const [width, height] = viewport.room(chart.labelled);
    if (chart.filters === null) return false;
    const small = !viewport.view.moved && viewport.view.scale < chart.geometry.readable;
    return (small && (width !== chart.room[0] || height !== chart.room[1])) || Math.abs(Math.log(width / height / chart.aspect)) > 0.04;
  };

  /** Draw what the filters let through; resolves once everything is on the page. */
  chart.show = (filters, beside = null) => {
    chart.filters = filters;
    const selection = filterEdges(graph, filters);
    if (chart.drawn) chart.drawn.cancelled = true;
    chart.selection = selection;
    chart.labelled = beside ? [graph, beside] : [graph];
    const [width, height] = viewport.room(chart.labelled);
    [chart.aspect, chart.room] = [width / height, [width, height]];
    const partner = beside && { graph: beside, selection: filterEdges(beside, filters) };
    chart.geometry = layout(graph, selection, [width, height], partner);
    chart.samples = null;
    viewport.show(graph, chart.geometry, filters.words);
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

  /** Whether all names could be read, with what heads read, were this drawn in the window as it is. */
  chart.fits = (filters) => {
    chart.resize();
    const room = viewport.room([graph]);
    const { width, height, form, readable } = layout(graph, filterEdges(graph, filters), room);
    return form !== "brief" && Math.min(room[0] / width, room[1] / height) >= readable;
  };

  /** One node at a time is in the tab order; arrow keys lead to the others. */
  function makeReachable() {
    const first = chart.pinned ?? graph.root?.id ?? chart.drawn.nodes.keys().next().value;
    chart.drawn.nodes.get(first)?.setAttribute("tabindex", "0");
  }

  /** Light up what is hovered, or else what is pinned: its edges, the nodes at their ends, its way to the root. */
  chart.light = (hovered) => {
    const target = hovered ?? (chart.pinned === null ? null : { node: chart.pinned });
    const node = target?.node === undefined ? null : graph.nodes.get(target.node);
    host.classList.toggle("focusing", node !== null || chart.pinned !== null);
    host.classList.toggle("pinned", chart.pinned !== null);
    pressed?.setAttribute("aria-pressed", "false");
    pressed = chart.drawn.nodes.get(chart.pinned);
    pressed?.setAttribute("aria-pressed", "true");
    viewport.light({ nodes: [], edges: [] });
    if (!target) return parts.lit.replaceChildren();
    const edges = node ? [...node.into, ...node.from].filter(chart.passes) : [graph.edges[target.edge]];
    const way = node ? wayToRoot(graph, node.id, chart.passes).filter((edge) => !edges.includes(edge)) : [];
    const nodes = new Set([...edges.flatMap((edge) => [edge.source, edge.target]), ...way.map((edge) => edge.target)]);
    if (node) nodes.add(node.id);
    parts.lit.replaceChildren(...litParts(graph, chart.geometry, chart.drawn, { edges, way, nodes, self: node?.id }));
    viewport.light({ nodes: [...nodes], self: node?.id, edges: node ? edges.map((edge) => placeEdge(graph, chart.geometry.nodes, edge)) : [] });
  };

  /** Whether an edge can be seen: its ends are placed, and its side is shown. */
  chart.passes = (edge) => {
    const placed = chart.geometry.nodes;
    return placed.has(edge.source) && placed.has(edge.target) && sideShown(graph, edge, chart.filters);
  };

  /** The drawn edge nearest to a point of the screen, if it is within reach. */
  chart.edgeAt = (x, y) => {
    const [wx, wy] = viewport.toWorld(x, y);
    const reach = 9 / viewport.view.scale;
    let best = null;
    let nearest = reach * reach;
    chart.samples ??= sampleEdges(chart.geometry);
    for (const sample of chart.samples) {
      const [left, top, right, bottom] = sample.box;
      if (wx < left - reach || wx > right + reach || wy < top - reach || wy > bottom + reach) continue;
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
