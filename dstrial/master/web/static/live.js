// The one stream of events of this page: what has changed on the master. Closed while nobody looks at the page.

import { useEffect, useRef, useState } from "htm/preact/standalone";
import { get, setReach } from "./api.js";

/** A change: the topics that the master tells, or null for "anything". @typedef {Set<string> | null} Change */

/** @type {Set<(change: Change) => void>} */
const listeners = new Set();
/** @type {EventSource | null} */
let source = null;
let master = "";
/** @type {(text: string) => void} */
let notify = () => {};
/** @type {() => void} */
let isListening = () => {};
const LONGEST_WAIT_MS = 400;

/** Nothing is loaded before the events are listened to, so that no change is missed between the two. @type {Promise<void>} */
const ready = new Promise((resolve) => {
  isListening = resolve;
  setTimeout(resolve, LONGEST_WAIT_MS);
});

/** @param {Change} change */
function tell(change) {
  for (const listener of [...listeners]) listener(change);
}

function open() {
  if (source || document.hidden) return;
  source = new EventSource("/page/events");
  source.onmessage = (event) => {
    const told = JSON.parse(event.data);
    if (told.master) {
      setReach("ok");
      if (master && master !== told.master) notify("The master was started again; what is shown is up to date.");
      if (master) tell(null);
      master = told.master;
      isListening();
    } else {
      tell(told.all ? null : new Set(told.topics));
    }
  };
  source.onerror = () => {
    // The browser tries again by itself, unless the answer was an error: then the login tells which.
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

/** Begin; `onNotice` is given what a person should read. @param {(text: string) => void} onNotice */
export function startLive(onNotice) {
  notify = onNotice;
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
}

/** @param {(change: Change) => void} listener @returns {() => void} what ends it */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const MIN_GAP_MS = 700;
const SHARE_OF_TIME = 4;

/**
 * Loads something, and loads it again whenever a topic changes that concerns it, but never for more than a part of the time.
 *
 * @template T
 * @param {(signal: AbortSignal, change: Change, before: T | null) => Promise<T>} load gives the whole; may add to what was there
 * @param {(topic: string) => boolean} concerns
 * @param {unknown[]} deps what is loaded is another thing when one of them changes
 * @returns {{ data: T | null, error: Error | null, reload: () => void, refresh: () => void }} `reload` loads everything again, `refresh` what `load` finds missing
 */
export function useLive(load, concerns, deps) {
  const [state, setState] = useState(/** @type {{data: T | null, error: Error | null}} */ ({ data: null, error: null }));
  const again = useRef((/** @type {Change} */ _change) => {});
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
      nextMs = endMs + Math.max(MIN_GAP_MS, (endMs - startMs) * SHARE_OF_TIME);
      isLoading = false;
      if (isWanted) plan();
    }
    function plan() {
      isWanted = true;
      if (!isLoading && !timer) timer = window.setTimeout(run, Math.max(0, nextMs - performance.now()));
    }
    again.current = (change) => {
      if (!change) pending = null;
      nextMs = 0;
      plan();
    };
    const end = subscribe((change) => {
      const found = change && new Set([...change].filter(concerns));
      if (found?.size === 0) return;
      pending = pending && found && new Set([...pending, ...found]);
      plan();
    });
    ready.then(run);
    return () => {
      abort.abort();
      window.clearTimeout(timer);
      end();
    };
  }, deps);
  return { ...state, reload: () => again.current(null), refresh: () => again.current(new Set()) };
}
