// Before there is a prompt: one that this model answers rightly is run at once; of the other tasks, one each.

import { el } from "../page/dom.js";
import { inert, percent } from "../page/text.js";
import { button } from "./pieces.js";
import { FRESH } from "./prompt.js";
import { ask } from "./server.js";

export function createStarters(app) {
  const list = el("ul", { class: "starters" });
  const place = el("section", { class: "welcome", "aria-label": "Prompts to begin with", hidden: true }, el("h3", {}, "Other prompts that this model answers"), list);
  const opened = ({ text, answer, wrong, counterfactual }) => ({ ...FRESH, text, answer, wrong: wrong ?? undefined, second: counterfactual ?? undefined });
  let begun = null;

  function item(found) {
    const { text, answer, probability, right, task } = found;
    const words = [el("bdi", {}, inert(text)), el("b", {}, el("bdi", {}, inert(answer))), el("span", { class: "hint" }, ` ${percent(probability)}${right ? "" : ", which is not what it says"} · ${task}`)];
    return el("li", {}, button(words, () => app.go(opened(found)), { class: "starter" }));
  }

  /** Whether a prompt may be shown: who types already is not interrupted. */
  const open = () => !app.state.text && !begun.taken && !app.written();

  /** Ask for one prompt of each task; the first that the model gets right is shown, unless something else is by then. */
  async function begin() {
    place.hidden = false;
    const found = [];
    for (const { name } of app.server.tasks) {
      try {
        found.push(await ask(`/api/tasks/${encodeURIComponent(name)}/starter`));
      } catch (error) {
        if (!error.status) throw error;
        continue; // a task that this model's vocabulary cannot spell
      }
      const right = found.filter((each) => each.right);
      list.replaceChildren(...(right.length ? right : found).map(item));
      if (found[found.length - 1].right && open()) {
        begun.taken = true;
        app.go(opened(found[found.length - 1]), { replace: true });
      }
    }
    if (open() && found.length) app.go(opened(found[0]), { replace: true });
    place.hidden = !found.length;
    return found.length > 0;
  }

  /** Begin, once. Whether there is any prompt to begin with. */
  function update() {
    begun ??= { taken: Boolean(app.state.text) };
    begun.work ??= begin();
    return begun.work;
  }

  return { place, update };
}
