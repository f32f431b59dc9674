// The stand-alone page: the circuits that are in it, and the choice among them.

import { createAddress, wholeNumber } from "./address.js";
import { byId, el } from "./dom.js";
import { indexCircuit } from "./graph.js";
import { createTabs } from "./mechanism.js";
import { inert, shorten } from "./text.js";
import { createTheme } from "./theme.js";
import { createView } from "./view.js";

export function start() {
  const data = JSON.parse(byId("data").textContent);
  const graphs = data.circuits.map(indexCircuit);
  const [first, second] = ["first", "second"].map((id) => el("select", { id, onchange: choiceChanged }));
  const choice = el("div", { class: "choice", id: "choice" }, el("label", {}, "Circuit ", first), el("label", {}, "beside it ", second));
  const theme = el("button", { type: "button", id: "theme", class: "icon" });
  const view = createView(byId("view"), { frame: { before: [choice], after: [theme] }, drawing, remember });
  const address = createAddress(restore);
  const container = byId("view");
  createTheme();

  function drawing(busy) {
    const page = document.documentElement.dataset;
    if (busy) return delete page.ready;
    page.drawn = String(Number(page.drawn ?? 0) + 1);
    page.ready = "true";
  }

  // Several circuits: a switch, and a second one beside the first.

  function fillChoices() {
    const title = (graph, i) => `${i + 1}. ${shorten(inert(graph.data.title), 70)}`;
    const options = () => graphs.map((graph, i) => el("option", { value: i }, title(graph, i)));
    first.replaceChildren(...options());
    second.replaceChildren(el("option", { value: "" }, "nothing"), ...options());
    choice.hidden = graphs.length < 2;
  }

  function choiceChanged() {
    if (second.value === first.value) second.value = "";
    build();
    remember(true);
  }

  const chosen = () => [first.value, second.value].filter((value) => value !== "").map(Number);

  function build(values = null) {
    view.show(chosen().map((i) => graphs[i]), { among: graphs, values });
  }

  // The address says what is looked at: which circuits, what the controls say, what is pinned.

  const atFirst = data.compare && graphs.length === 2 ? [0, 1] : [0];

  function remember(step = false) {
    const circuits = String(chosen()) === String(atFirst) ? null : chosen().map((i) => i + 1).join();
    address.write({ circuits, tab: container.dataset.tab === "mechanism" ? null : (container.dataset.tab ?? null), ...view.tell() }, step);
  }

  function restore(values) {
    const numbers = [...new Set((values.circuits ?? "").split(",").map((text) => wholeNumber(text, 1, graphs.length)))];
    const wanted = numbers.includes(null) || numbers.length > 2 ? atFirst : numbers.map((number) => number - 1);
    const before = view.charts.length ? String(chosen()) : "";
    [first.value, second.value] = [wanted[0], wanted[1] ?? ""];
    if (String(wanted) !== before) build(values);
    else view.restore(values);
  }

  fillChoices();
  const asked = address.read();
  restore(asked);
  if (data.mechanism) {
    const showTab = createTabs(container, data.mechanism, data.circuits[0], () => remember());
    showTab(["graph", "table"].includes(asked.tab) ? asked.tab : "mechanism");
  }
  return view;
}
