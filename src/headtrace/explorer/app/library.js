// What was computed already: recordings, their patterns, the model under changes. The latest few of each are kept.

import { Patterns } from "./patterns.js";
import { ask, ofRecording } from "./server.js";

const KEPT = 6;

/** Answers by what was asked; only those that came are kept. */
function remembered(compute) {
  const known = new Map();
  const get = async (key, ...given) => {
    if (!known.has(key)) known.set(key, await compute(...given));
    const value = known.get(key);
    known.delete(key);
    known.set(key, value);
    if (known.size > KEPT) known.delete(known.keys().next().value);
    return value;
  };
  return get;
}

export const promptOf = ({ text, model }) => ({ text, model });

/**
 * What is explained: an answer rather than a wrong one, or how likely an answer is; null without an answer. Answers that
 * the model was seen to give are meant by their ids: text alone may be split into tokens in another way.
 */
export function rootOf({ answer, wrong }, { answers }) {
  if (!answer) return null;
  const meant = (text) => answers.find(({ token }) => token === text)?.id ?? text;
  return wrong ? { answer: meant(answer), wrong: meant(wrong), kind: "linear" } : { answer: meant(answer), kind: "probability" };
}

export function createLibrary(models) {
  const heads = (recording) => models[recording.model].n_heads;
  const record = remembered((prompt, signal) => ask("/api/record", { body: prompt, signal }));
  const intervene = remembered((body, signal) => ask("/api/intervene", { body, signal }));
  const at = (recording, rest) => `/api/recordings/${encodeURIComponent(recording.id)}/${rest}`;
  const patterns = remembered(async (recording, again, signal) => {
    const bytes = await ofRecording(() => ask(at(recording, "patterns"), { bytes: true, signal }), again);
    return new Patterns(bytes, heads(recording), recording.tokens.length);
  });
  const head = remembered((recording, again, layer, number, signal) =>
    ofRecording(() => ask(at(recording, `heads/${layer}/${number}`), { signal }), again));

  return {
    record: (prompt, signal) => record(JSON.stringify(prompt), prompt, signal),
    intervene: (body, signal) => intervene(JSON.stringify(body), body, signal),
    /** `again` makes the recording once more, where the server has dropped it. */
    patterns: (recording, again, signal) => patterns(recording.id, recording, again, signal),
    head: (recording, again, layer, number, signal) => head(`${recording.id} ${layer} ${number}`, recording, again, layer, number, signal),
    recordAgain: (prompt, signal) => () => ask("/api/record", { body: prompt, signal }),
    interveneAgain: (body, signal) => () => ask("/api/intervene", { body, signal }),
  };
}
