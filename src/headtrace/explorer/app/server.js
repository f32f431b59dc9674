// Talking to the explorer's own server: nothing is asked of anyone else.

/** What the server refused, in its words. */
export class ServerError extends Error {
  constructor(status, { code, message }) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const PATIENCE = [500, 1000, 2000, 4000]; // milliseconds between attempts to reach a server that is gone

let told = () => {};

/** `tell(words)` is called with what keeps the explorer waiting, and with null once it goes on. */
export function onWaiting(tell) {
  told = tell;
}

/** Ask for JSON, or `bytes`. Waits its turn where the server is busy, and for a server that is gone to come back. */
export async function ask(path, { body, method = body === undefined ? "GET" : "POST", signal, bytes = false, keepalive = false } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const request = { method, headers, signal, keepalive, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" };
  for (let attempt = 0; ; attempt++) {
    const answer = await reached(path, request, signal);
    if (answer.status === 429) {
      const seconds = Math.max(1, Math.min(60, Number(answer.headers.get("Retry-After")) || 1));
      const { message } = await refusal(answer);
      told(`${message} Trying again in ${seconds} s.`);
      await pause(1000 * seconds, signal);
      continue;
    }
    told(null);
    if (!answer.ok) throw new ServerError(answer.status, await refusal(answer));
    return bytes ? new Uint8Array(await answer.arrayBuffer()) : answer.json();
  }
}

const LOST = "The connection to the server is lost. Is headtrace serve still running? Trying again.";
const SILENT = "The server does not answer. It may be busy, or the way to it is broken. Still waiting.";
const WATCHED = 1000; // milliseconds between two looks whether the server is there
const SILENCE = 5000; // milliseconds without an answer that are said

/** Say that the server is gone as soon as it is, not when it is next needed. */
export function watch() {
  let [lost, looking] = [false, false];
  const look = async () => {
    if (document.hidden || looking) return;
    looking = true;
    const silent = setTimeout(() => ((lost = true), told(SILENT)), SILENCE);
    try {
      await fetch("/api/server", { cache: "no-store" });
      if (lost) told(null);
      lost = false;
    } catch {
      lost = true;
      told(LOST);
    }
    clearTimeout(silent);
    looking = false;
  };
  setInterval(look, WATCHED);
  document.addEventListener("visibilitychange", look); // who comes back to the page learns it at once
}

async function reached(path, request, signal) {
  for (let attempt = 0; ; attempt++) {
    try {
      return await fetch(path, request);
    } catch (error) {
      if (signal?.aborted) throw error;
      told(LOST);
      await pause(PATIENCE[Math.min(attempt, PATIENCE.length - 1)], signal);
    }
  }
}

async function refusal(answer) {
  try {
    const { code, message } = await answer.json();
    return { code: String(code), message: String(message) };
  } catch {
    return { code: "unknown", message: `The server answered with status ${answer.status} and no words.` };
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

/** Of work that is started again and again only the latest counts: what went before is aborted, and says nothing more. */
export function latestOnly() {
  let controller = null;
  const run = async (work, failed) => {
    controller?.abort();
    const own = (controller = new AbortController());
    try {
      await work(own.signal);
    } catch (error) {
      if (!own.signal.aborted) failed(error);
    }
  };
  run.stop = () => controller?.abort();
  return run;
}

/**
 * Follow a job to its end. `heard(event, data)` is called for queued, progress and partial; resolves with what `done`
 * says, rejects with what `failed` says. Aborting the signal cancels the job at the server.
 */
export function follow(job, heard, signal) {
  const path = `/api/jobs/${encodeURIComponent(job.id)}`;
  return new Promise((resolve, reject) => {
    let source = null;
    const cancel = () => {
      source?.close();
      removeEventListener("pagehide", cancel);
      ask(path, { method: "DELETE", keepalive: true }).catch(() => {});
      reject(new ServerError(0, { code: "cancelled", message: "The trace was cancelled." }));
    };
    const end = (settle) => (value) => {
      source?.close();
      signal.removeEventListener("abort", cancel);
      removeEventListener("pagehide", cancel);
      told(null);
      settle(value);
    };
    const [done, failed] = [end(resolve), end(reject)];
    const listen = () => {
      source = new EventSource(`${path}/events`);
      for (const name of ["queued", "progress", "partial"]) source.addEventListener(name, ({ data }) => heard(name, JSON.parse(data)));
      source.addEventListener("done", ({ data }) => done(JSON.parse(data)));
      source.addEventListener("failed", ({ data }) => failed(new ServerError(200, { code: "failed", message: JSON.parse(data).error })));
      source.addEventListener("cancelled", () => failed(new ServerError(200, { code: "cancelled", message: "The trace was cancelled." })));
      source.addEventListener("open", () => told(null));
      source.addEventListener("error", lost);
    };
    // The stream broke: the job may have ended meanwhile, or the server may have been started anew and not know it.
    async function lost() {
      source.close();
      try {
        const { state } = await ask(path, { signal });
        if (state === "done") return done(await ask(`${path}/circuit`, { signal }));
        await pause(1000, signal);
        listen();
      } catch (error) {
        if (!signal.aborted) failed(error);
      }
    }
    if (signal.aborted) return cancel();
    signal.addEventListener("abort", cancel, { once: true });
    addEventListener("pagehide", cancel, { once: true });
    listen();
  });
}
