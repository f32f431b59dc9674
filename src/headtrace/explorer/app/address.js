// The state of the explorer as named values of its address, which restore it. They are in the fragment, which is never
// sent anywhere.

import { wholeNumber } from "../page/address.js";

export const ORDERS = ["place", "most", "least"];
export const MEASURES = ["strongest", "sink", "previous", "entropy"];

/** How each field is read from text; what cannot be read is left out. */
const one = (of) => (text) => (of.includes(text) ? text : undefined);
const text = (value) => value;
const flag = (value) => value === "yes" || undefined;
const index = (value) => wholeNumber(value, 0, 1_000_000) ?? undefined;
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
  view: text,
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
  alone: flag,
  sort: one(["attention", "entropy", "sink"]),
  swap: text,
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
  look: text,
};

const WRITTEN = {
  traced: () => "yes",
  alone: () => "yes",
  head: ([layer, head]) => `L${layer}H${head}`,
  cell: ([dest, src]) => `${dest}-${src}`,
  changes: JSON.stringify,
  open: (ids) => ids.join("|"),
};

export const START = { view: "explain", model: 0, order: "place", by: "strongest", paths: "complete", changes: [], open: [] };

/** The state that the named values of an address stand for, whatever they hold. */
export function toState(values) {
  const state = { ...START };
  for (const [name, read] of Object.entries(FIELDS)) {
    const value = Object.hasOwn(values, name) ? read(values[name]) : undefined;
    if (value !== undefined) state[name] = value;
  }
  return state;
}

/** The named values of a state; what is as at the start is left out. */
export function toValues(state) {
  const plain = (name, value) => (value === undefined || value === null || value === false ? null : (WRITTEN[name]?.(value) ?? String(value)));
  const values = Object.keys(FIELDS).map((name) => [name, plain(name, state[name])]);
  return Object.fromEntries(values.filter(([name, value]) => value !== null && value !== plain(name, START[name])));
}
