// What was computed already: recordings, their patterns, the model under changes. The latest few of each are kept.

import { Patterns } from "./patterns.js";
import { ask } from "./server.js";

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

/** An answer that the model was seen to give is meant by its id: text alone may be split into tokens in another way. */
export const meantBy = (text, { answers }) => answers.find(({ token }) => token === text)?.id ?? text;

/**
 * Everything about a recorded prompt is asked for by the id of its recording. Where the server no longer keeps it, it is
 * made once more (`again`), which gives it the same id.
 */
export function createLibrary(models) {
  const about = async (recording, get, signal) => {
    try {
      return await get();
    } catch (error) {
      if (error.code !== "not_kept") throw error;
      await recording.again(signal);
      return get();
    }
  };
  const at = (recording, rest, options) => about(recording, () => ask(`/api/recordings/${encodeURIComponent(recording.id)}/${rest}`, options), options.signal);
  const post = (recording, name, body, signal) => about(recording, () => ask(`/api/${name}`, { body: { recording: recording.id, ...body }, signal }), signal);

  const record = remembered(async (prompt, signal) => {
    const again = (latest) => ask("/api/record", { body: prompt, signal: latest });
    return { ...(await again(signal)), again };
  });
  const intervene = remembered(async (recording, body, signal) => {
    const again = (latest) => post(recording, "intervene", body, latest);
    const view = await again(signal);
    return { ...view, changed: { ...view.changed, again } };
  });
  const patterns = remembered(async (recording, signal) => {
    const bytes = await at(recording, "patterns", { bytes: true, signal });
    return new Patterns(bytes, models[recording.model].n_heads, recording.tokens.length);
  });
  const head = remembered((recording, layer, number, signal) => at(recording, `heads/${layer}/${number}`, { signal }));

  const question = remembered((recording, body, signal) => post(recording, "question", body, signal));

  return {
    post,
    question: (recording, body, signal) => question(JSON.stringify([recording.id, body]), recording, body, signal),
    record: (prompt, signal) => record(JSON.stringify(prompt), prompt, signal),
    intervene: (recording, body, signal) => intervene(JSON.stringify([recording.id, body]), recording, body, signal),
    patterns: (recording, signal) => patterns(recording.id, recording, signal),
    head: (recording, layer, number, signal) => head(`${recording.id} ${layer} ${number}`, recording, layer, number, signal),
  };
}
