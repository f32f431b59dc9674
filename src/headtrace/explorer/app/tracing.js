// A circuit, as it is traced: what was asked, how far it is, and the parts that are there already.

import { indexCircuit } from "../page/graph.js";
import { follow } from "./server.js";

const APART = 500; // milliseconds between drawings of a circuit that grows

/**
 * Trace a circuit of a recorded prompt. `told(words, share)` says how far it is, `grown(graph)` shows a part of it. Resolves with
 * { graph, python, job }; aborting the signal cancels the work at the server.
 */
export async function traced(library, recording, request, { told, grown, signal }) {
  const job = await library.post(recording, "trace", request, signal);
  let [last, waiting, ended] = [0, 0, false];
  const partial = (circuit) => {
    clearTimeout(waiting);
    const show = () => {
      if (ended || signal.aborted || !circuit.edges.length) return;
      last = performance.now();
      grown(indexCircuit(circuit));
    };
    waiting = setTimeout(show, Math.max(0, last + APART - performance.now()));
  };
  const heard = (name, data) => {
    if (name === "queued") told(data.ahead ? `Waiting: ${data.ahead} before this one.` : "Waiting for the model…", null);
    else if (name === "progress") told(data.of ? `Tracing: ${data.done} of ${data.of}` : `Tracing: ${data.done}`, data.of ? data.done / data.of : null);
    else partial(data.circuit);
  };
  try {
    const { circuit, python } = await follow(job, heard, signal);
    return { graph: indexCircuit(circuit), python, job: job.id };
  } finally {
    ended = true;
    clearTimeout(waiting);
  }
}
