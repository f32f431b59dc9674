// The atlas: a finder of heads, and a page for each of them.

import { byId } from "./dom.js";
import { createTheme } from "./theme.js";
import { showFinder } from "./finder.js";
import { showHead } from "./head.js";

export function start() {
  const data = JSON.parse(byId("data").textContent);
  createTheme();
  (data.kind === "finder" ? showFinder : showHead)(data);
  document.documentElement.dataset.ready = "true";
  return data.kind;
}
