// Small things that many views have: states, times, notices.

import { html, useEffect, useState } from "htm/preact/standalone";
import { ago, localTime, utcTime } from "../format.js";

/** @param {{ state: string }} props */
export function State({ state }) {
  const text = state.replace("STOPPING_", "stopping: ").toLowerCase();
  return html`<span class=${`state ${state.startsWith("STOPPING_") ? "STOPPING" : state}`}>${text}</span>`;
}

/** @param {{ at: string | null, isAgo?: boolean }} props as the master writes it; shown as the time since then, or as date and time */
export function Time({ at, isAgo }) {
  return at ? html`<time datetime=${at} title=${isAgo ? `${localTime(at)} (${utcTime(at)})` : utcTime(at)}>${isAgo ? ago(at) : localTime(at)}</time>` : null;
}

/** Nothing for what failed or was cancelled: it has an end, and no progress. @param {{ value: number, state?: string, label?: string }} props from 0 to 1 */
export function Progress({ value: given, state, label }) {
  if (state === "ERROR" || state === "CANCELED") return null;
  const value = state === "COMPLETED" ? 1 : given;
  const percent = Math.round(1000 * value) / 10;
  return html`<span class="progress"><progress max="1" value=${value} aria-label=${label ?? "progress"}></progress> ${percent} %</span>`;
}

/** @param {{ error: Error | null }} props */
export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message}</p>` : null;
}

/** State that the browser keeps, for all pages. @template T @param {string} name @param {T} fallback @returns {[T, (value: T) => void]} */
export function useStored(name, fallback) {
  const [value, set] = useState(() => /** @type {T} */ (JSON.parse(localStorage.getItem(name) ?? "null") ?? fallback));
  return [value, (now) => { localStorage.setItem(name, JSON.stringify(now)); set(now); }];
}

/** Text with a button that copies it. @param {{ text: string, label?: string }} props */
export function Copy({ text, label }) {
  const [isDone, setDone] = useState(false);
  useEffect(() => {
    if (!isDone) return undefined;
    const timer = setTimeout(() => setDone(false), 1500);
    return () => clearTimeout(timer);
  }, [isDone]);
  return html`<span class="copy"><code>${label ?? text}</code>
    <button title=${text} onClick=${() => navigator.clipboard.writeText(text).then(() => setDone(true))}>${isDone ? "copied" : "copy"}</button></span>`;
}

/** @type {Set<(text: string, isProblem: boolean) => void>} */
const noticeListeners = new Set();

/** Tell the person something. @param {string} text @param {boolean} [isProblem] */
export function notice(text, isProblem = false) {
  for (const listener of noticeListeners) listener(text, isProblem);
}

/** Do something, and tell what kept it from being done. @param {() => Promise<unknown>} action @param {string} [done] */
export async function attempt(action, done) {
  try {
    await action();
    if (done) notice(done);
    return true;
  } catch (error) {
    notice(/** @type {Error} */ (error).message, true);
    return false;
  }
}

/** Where notices appear, for some seconds; problems until they are closed. */
export function Notices() {
  const [shown, setShown] = useState(/** @type {{ key: number, text: string, isProblem: boolean }[]} */ ([]));
  useEffect(() => {
    let key = 0;
    const listener = (/** @type {string} */ text, /** @type {boolean} */ isProblem) => {
      const own = ++key;
      setShown((before) => [...before.slice(-4), { key: own, text, isProblem }]);
      if (!isProblem) setTimeout(() => setShown((before) => before.filter((one) => one.key !== own)), 6000);
    };
    noticeListeners.add(listener);
    return () => noticeListeners.delete(listener);
  }, []);
  return html`<div class="notices" role="status" aria-live="polite">
    ${shown.map(
      (one) => html`<p key=${one.key} class=${one.isProblem ? "problem" : ""}>${one.text}
        <button aria-label="Close" onClick=${() => setShown((before) => before.filter((other) => other.key !== one.key))}>×</button></p>`,
    )}
  </div>`;
}
