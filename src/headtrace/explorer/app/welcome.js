// Before there is a prompt: what can be done here, and a first example of each task.

import { el } from "../page/dom.js";
import { inert } from "../page/text.js";
import { button } from "./pieces.js";
import { ask } from "./server.js";

const STEPS = [
  ["Type a prompt", "and see where every attention head looks."],
  ["Click a weight", "and see why: which signals made the head look there, and what it carried over."],
  ["Ask for a circuit", "of an answer: every component that led to it, down to the words."],
  ["Change something", "in the running model, and see what it answers then."],
];

export function createWelcome(app) {
  const starters = app.server.tasks.map(({ name, description }) => {
    const open = async () => {
      const [{ text, answer, wrong, counterfactual }] = await ask(`/api/tasks/${encodeURIComponent(name)}/examples?count=1`);
      app.go({ text, answer, wrong: wrong ?? undefined, second: counterfactual ?? undefined });
    };
    const start = button([el("b", {}, name), el("span", { class: "hint" }, inert(description))], () => open().catch((error) => said.append(inert(error.message))), { class: "starter" });
    return el("li", {}, start);
  });
  const said = el("p", { class: "hint", role: "status" });
  return el(
    "div",
    { class: "welcome" },
    el("h2", {}, "Why does this head attend here?"),
    el("ol", { class: "steps" }, ...STEPS.map(([what, then]) => el("li", {}, el("b", {}, what), ` ${then}`))),
    el("h3", {}, "Or begin with an example"),
    el("ul", { class: "starters" }, ...starters),
    said,
  );
}
