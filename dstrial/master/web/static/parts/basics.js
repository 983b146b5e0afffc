// Small components that many views share: states, times, form fields, notices.

import { html, useEffect, useState } from "htm/preact/standalone";
import { ago, localTime, utcTime } from "../format.js";

/** @param {{ state: string }} props */
export function State({ state }) {
  const text = state.replace("STOPPING_", "stopping: ").toLowerCase();
  return html`<span class=${`state ${state.startsWith("STOPPING_") ? "STOPPING" : state}`}>${text}</span>`;
}

/** A time in ISO format, shown as date and time or, with `isAgo`, as the time since then. @param {{ at: string | null, isAgo?: boolean }} props */
export function Time({ at, isAgo }) {
  return at ? html`<time datetime=${at} title=${isAgo ? `${localTime(at)} (${utcTime(at)})` : utcTime(at)}>${isAgo ? ago(at) : localTime(at)}</time>` : null;
}

/** A progress bar; nothing if the state is ERROR or CANCELED. @param {{ value: number, state?: string, label?: string }} props `value` is from 0 to 1 */
export function Progress({ value: given, state, label }) {
  if (state === "ERROR" || state === "CANCELED") return null;
  const value = state === "COMPLETED" ? 1 : given;
  const percent = Math.round(1000 * value) / 10;
  return html`<span class="progress"><progress max="1" value=${value} aria-label=${label ?? "progress"}></progress> ${percent} %</span>`;
}

/** Links to a trial and its experiment. @param {{ trial: number, experiment: number }} props */
export function TrialLinks({ trial, experiment }) {
  return html`<a href=${`/det/experiments/${experiment}/trials/${trial}`}>trial ${trial}</a> of <a href=${`/det/experiments/${experiment}`}>experiment ${experiment}</a>`;
}

/** @param {{ error: Error | null }} props */
export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message}</p>` : null;
}

/** Says that data are being loaded, or why they could not be; `children` follow the error. @param {{ error: Error | null, children?: unknown }} props */
export function Pending({ error, children }) {
  return error ? html`<${Problem} error=${error} />${children}` : html`<p class="loading">Loading …</p>`;
}

/** A checkbox with its label as children. @param {{ checked: boolean, set: (isChecked: boolean) => void, children?: unknown }} props */
export function Check({ checked, set, children }) {
  return html`<label><input type="checkbox" checked=${checked} onChange=${(/** @type {any} */ event) => set(event.target.checked)} /> ${children}</label>`;
}

/** A field for a search text. @param {{ text: string, set: (text: string) => void, label: string, placeholder: string, title?: string }} props */
export function SearchField({ text, set, label, placeholder, title }) {
  return html`<input type="search" value=${text} onInput=${(/** @type {any} */ event) => set(event.target.value)} aria-label=${label} placeholder=${placeholder} title=${title} />`;
}

/** A drop-down list with its options as children. @param {{ value: string, set: (value: string) => void, label?: string, children?: unknown }} props */
export function Select({ value, set, label, children }) {
  return html`<select aria-label=${label} value=${value} onChange=${(/** @type {any} */ event) => set(event.target.value)}>${children}</select>`;
}

/** Like `useState`, but the browser stores the value for all pages of the master. @template T @param {string} name @param {T} fallback @returns {[T, (value: T) => void]} */
export function useStored(name, fallback) {
  const [value, set] = useState(() => /** @type {T} */ (JSON.parse(localStorage.getItem(name) ?? "null") ?? fallback));
  return [value, (now) => { localStorage.setItem(name, JSON.stringify(now)); set(now); }];
}

/** Text with a button that copies it. @param {{ text: string, label?: string }} props `label` is shown instead of the text */
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

/** Show a notice to the user. @param {string} text @param {boolean} [isProblem] */
export function notice(text, isProblem = false) {
  for (const listener of noticeListeners) listener(text, isProblem);
}

/** Run an action; show its error as a notice, or `done` if it succeeds. @param {() => Promise<unknown>} action @param {string} [done] @returns {Promise<boolean>} whether it succeeded */
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

/** The notices: problems stay until they are closed, others for some seconds. */
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
