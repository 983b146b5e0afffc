// The page's stream of server-sent events, which name what has changed on the master. It is closed while the page is hidden.

import { useEffect, useRef, useState } from "htm/preact/standalone";
import { get, setConnection } from "./api.js";

/** The topics that have changed, such as "trial:7"; null if anything may have. @typedef {Set<string> | null} Change */

/** @type {Set<(change: Change) => void>} */
const listeners = new Set();
/** @type {EventSource | null} */
let source = null;
let master = ""; // id, which differs after a restart
/** @type {(text: string) => void} */
let notify = () => {};
/** @type {() => void} */
let resolveReady = () => {};
const MAX_WAIT_MS = 400;

/** Resolved when the stream is open: data are loaded afterwards, so that no change in between is missed. @type {Promise<void>} */
const ready = new Promise((resolve) => {
  resolveReady = resolve;
  setTimeout(resolve, MAX_WAIT_MS);
});

/** Pass a change to all listeners. @param {Change} change */
function publish(change) {
  for (const listener of [...listeners]) listener(change);
}

function open() {
  if (source || document.hidden) return;
  source = new EventSource("/page/events");
  source.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (message.master) {
      setConnection("ok");
      if (master && master !== message.master) notify("The master was started again; what is shown is up to date.");
      if (master) publish(null);
      master = message.master;
      resolveReady();
    } else {
      publish(message.all ? null : new Set(message.topics));
    }
  };
  source.onerror = () => {
    // The browser reconnects by itself unless the response was an error. A request then finds out whether the login has expired.
    const isOver = source?.readyState === EventSource.CLOSED;
    get("/page/session").catch(() => {});
    if (isOver) {
      close();
      setTimeout(open, 3000);
    }
  };
}

function close() {
  source?.close();
  source = null;
}

/** Open the stream. @param {(text: string) => void} onNotice called with texts for the user */
export function startLive(onNotice) {
  notify = onNotice;
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
}

/** @param {(change: Change) => void} listener @returns {() => void} ends the subscription */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** @param {number} id @returns {(topic: string) => boolean} whether a topic concerns an experiment or metrics of its trials */
export const ofExperiment = (id) => (topic) => topic === `experiment:${id}` || (topic.startsWith("metrics:") && topic.endsWith(`:${id}`));

/** @param {number} id @returns {(topic: string) => boolean} whether a topic concerns a trial or its metrics */
export const ofTrial = (id) => (topic) => topic === `trial:${id}` || topic.startsWith(`metrics:${id}:`);

const MIN_GAP_MS = 700; // between two loads
const GAP_PER_LOAD_TIME = 4; // the gap after a load, as a multiple of the time that it took

/**
 * Load data, and load them again when a topic changes that concerns them; loads are limited to a fifth of the time.
 *
 * @template T
 * @param {(signal: AbortSignal, change: Change, before: T | null) => Promise<T>} load returns all data; may reuse parts of `before` that `change` does not concern
 * @param {(topic: string) => boolean} concerns
 * @param {unknown[]} deps values that decide what is loaded; when one changes, everything is loaded anew
 * @returns {{ data: T | null, error: Error | null, reload: () => void, refresh: () => void }} `reload` loads everything again, `refresh` only what `load` finds missing in `before`
 */
export function useLive(load, concerns, deps) {
  const [state, setState] = useState(/** @type {{data: T | null, error: Error | null}} */ ({ data: null, error: null }));
  const loadAgain = useRef((/** @type {Change} */ _change) => {});
  useEffect(() => {
    const abort = new AbortController();
    /** @type {T | null} */
    let data = null;
    let isLoading = false;
    let isWanted = false;
    /** @type {Change} */
    let pending = null;
    let nextMs = 0;
    let timer = 0;
    setState({ data: null, error: null });

    async function run() {
      timer = 0;
      if (isLoading || abort.signal.aborted) return;
      isLoading = true;
      isWanted = false;
      const change = pending;
      pending = new Set();
      const startMs = performance.now();
      try {
        data = await load(abort.signal, change, data);
        if (!abort.signal.aborted) setState({ data, error: null });
      } catch (error) {
        if (!abort.signal.aborted) setState({ data, error: /** @type {Error} */ (error) });
        pending = null;
      }
      const endMs = performance.now();
      nextMs = endMs + Math.max(MIN_GAP_MS, (endMs - startMs) * GAP_PER_LOAD_TIME);
      isLoading = false;
      if (isWanted) schedule();
    }
    function schedule() {
      isWanted = true;
      if (!isLoading && !timer) timer = window.setTimeout(run, Math.max(0, nextMs - performance.now()));
    }
    loadAgain.current = (change) => {
      if (!change) pending = null;
      nextMs = 0;
      schedule();
    };
    const end = subscribe((change) => {
      const found = change && new Set([...change].filter(concerns));
      if (found?.size === 0) return;
      pending = pending && found && new Set([...pending, ...found]);
      schedule();
    });
    ready.then(run);
    return () => {
      abort.abort();
      window.clearTimeout(timer);
      end();
    };
  }, deps);
  return { ...state, reload: () => loadAgain.current(null), refresh: () => loadAgain.current(new Set()) };
}
