// What is looked at, in the address of the page: a link, a reload and the back button bring it back.

const SETTLED = 200; // milliseconds: browsers refuse addresses that change with every move of a slider

/**
 * Keep named values in the fragment (`#paths=content&pin=12`). `restored(values)` is called when the reader goes back or
 * forward, or edits the address. In a frame there is no address of one's own, and nothing is kept.
 */
export function createAddress(restored) {
  const usable = window === window.parent && !["about:", "data:", "blob:"].includes(location.protocol);
  let waiting = null;

  function read() {
    return usable ? Object.fromEntries(new URLSearchParams(location.hash.slice(1))) : {};
  }

  /** Values that are null are left out. With `step` the back button leads to what was before; the rest of the time it does not. */
  function write(values, step = false) {
    if (!usable) return;
    if (step) {
      settle();
      return put(values, "pushState");
    }
    clearTimeout(waiting?.timer);
    waiting = { values, timer: setTimeout(settle, SETTLED) };
  }

  function settle() {
    if (!waiting) return;
    clearTimeout(waiting.timer);
    put(waiting.values, "replaceState");
    waiting = null;
  }

  function put(values, how) {
    const said = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
    const fragment = new URLSearchParams(said.map(([name, value]) => [name, String(value)])).toString().replaceAll("%2C", ",");
    if (fragment === location.hash.slice(1)) return;
    try {
      history[how](null, "", fragment ? `#${fragment}` : location.href.replace(/#.*$/, ""));
    } catch {
      // A page that may not change its address still shows everything.
    }
  }

  if (usable) {
    addEventListener("popstate", () => {
      clearTimeout(waiting?.timer);
      waiting = null;
      restored(read());
    });
  }
  return { read, write };
}

/** A whole number within limits, or null: an address can say anything. */
export function wholeNumber(text, least, most) {
  const value = /^\d{1,15}$/.test(text ?? "") ? Number(text) : NaN;
  return value >= least && value <= most ? value : null;
}

/** One of the names of something, or null. */
export function oneOf(text, names) {
  return Object.hasOwn(names, text ?? "") ? text : null;
}
