// Light or dark.

import { byId } from "./dom.js";

/** As the system says, until the button says otherwise. */
export function createTheme(changed) {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const say = () => {
    button.setAttribute("aria-label", isDark() ? "Switch to light" : "Switch to dark");
    button.textContent = isDark() ? "☀" : "☾";
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    say();
    changed?.();
  });
  system.addEventListener("change", say);
  say();
}
