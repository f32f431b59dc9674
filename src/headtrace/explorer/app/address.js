// The state of the explorer, and the fragment of the address that restores it. A fragment is never sent anywhere.

export const VIEWS = ["heads", "circuit", "beside", "run"];
export const ORDERS = ["place", "most", "least"];
export const MEASURES = ["strongest", "sink", "previous", "entropy"];

/** How each field is read from text; what cannot be read is left out. */
const one = (of) => (text) => (of.includes(text) ? text : undefined);
const text = (value) => value;
const flag = (value) => value === "yes" || undefined;
const index = (value) => (/^\d{1,7}$/.test(value) ? Number(value) : undefined);
const numeric = (value) => (value.trim() !== "" && Number.isFinite(Number(value)) ? Number(value) : undefined);
const pair = (pattern) => (value) => pattern.exec(value)?.slice(1).map(Number);
const several = (value) => value.split("|").filter(Boolean);

function changes(value) {
  try {
    const found = JSON.parse(value);
    return Array.isArray(found) && found.every((item) => item && typeof item === "object") ? found : undefined;
  } catch {
    return undefined;
  }
}

const FIELDS = {
  view: one(VIEWS),
  text,
  model: index,
  order: one(ORDERS),
  by: one(MEASURES),
  least: numeric,
  most: numeric,
  first: one(["out"]),
  show: one(["changed", "difference"]),
  head: pair(/^L(\d{1,6})H(\d{1,6})$/),
  cell: pair(/^(\d{1,6})-(\d{1,6})$/),
  answer: text,
  wrong: text,
  paths: one(["attention", "complete"]),
  traced: flag,
  changes,
  generate: index,
  second: text,
  answer2: text,
  wrong2: text,
  model2: index,
  search: text,
  family: index,
  open: several,
};

const WRITTEN = {
  traced: () => "yes",
  head: ([layer, head]) => `L${layer}H${head}`,
  cell: ([dest, src]) => `${dest}-${src}`,
  changes: JSON.stringify,
  open: (ids) => ids.join("|"),
};

export const START = { view: "heads", model: 0, order: "place", by: "strongest", paths: "complete", changes: [], open: [] };

/** The state that a fragment stands for, whatever it holds. */
export function parse(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const state = { ...START };
  for (const [name, read] of Object.entries(FIELDS)) {
    const value = given.has(name) ? read(given.get(name)) : undefined;
    if (value !== undefined) state[name] = value;
  }
  return state;
}

/** The fragment for a state; what is as at the start is not written. */
export function written(state) {
  const out = new URLSearchParams();
  for (const name of Object.keys(FIELDS)) {
    const value = state[name];
    if (value === undefined || value === null || value === false) continue;
    const plain = WRITTEN[name]?.(value) ?? String(value);
    if (plain !== (WRITTEN[name] && START[name] ? WRITTEN[name](START[name]) : String(START[name]))) out.set(name, plain);
  }
  return `#${out}`;
}
