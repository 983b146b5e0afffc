// The ranges of parallel coordinates without a mouse: two sliders for each axis, its lower and its upper end.

import { html } from "htm/preact/standalone";
import { labelAt } from "../../hp_space.js";

/** @typedef {import("../../hp_space.js").Axis} Axis */
/** @typedef {import("./parallel.js").Ranges} Ranges */

/** Places of a slider on an axis of numbers. */
const STEPS = 100;
/** How far a range of words goes beyond the last one, in words: an address has three digits of it. */
const MARGIN = 0.4;

/** @param {Axis} axis @returns {number} the last place of its sliders, the first one is 0; less than 1 where there is nothing to choose */
export const lastPlace = (axis) => (axis.kind === "categorical" ? axis.values.length - 1 : axis.low < axis.high ? STEPS : 0);

/** @param {Axis} axis @param {[number, number] | undefined} range from 0 to 1 @returns {[number, number]} places of its two sliders */
export function placesOf(axis, range) {
  const last = lastPlace(axis);
  if (!range) return [0, last];
  const [low, high] = axis.kind === "categorical" ? [Math.ceil(range[0] * last - 1e-6), Math.floor(range[1] * last + 1e-6)] : range.map((at) => Math.round(at * last));
  return [Math.min(Math.max(low, 0), last), Math.min(Math.max(high, 0), last)];
}

/** @param {Axis} axis @param {number} low @param {number} high places @returns {[number, number] | null} the range; null for the whole axis */
export function rangeOf(axis, low, high) {
  const last = lastPlace(axis);
  if (low <= 0 && high >= last) return null;
  const margin = axis.kind === "categorical" ? MARGIN : 0;
  return [Math.max((low - margin) / last, 0), Math.min((high + margin) / last, 1)];
}

/**
 * @param {object} props
 * @param {Axis[]} props.axes
 * @param {Ranges} props.ranges
 * @param {(ranges: Ranges) => void} props.onRanges
 * @param {string} props.status how many trials are kept
 */
export function RangeSliders({ axes, ranges, onRanges, status }) {
  /** @param {Axis} axis @param {[number, number] | null} range */
  function set({ name }, range) {
    const { [name]: _old, ...rest } = ranges;
    onRanges(range ? { ...rest, [name]: range } : rest);
  }
  /** @param {Axis} axis @param {0 | 1} end */
  function slider(axis, end) {
    const places = placesOf(axis, ranges[axis.name]);
    const last = lastPlace(axis);
    const said = ["at least", "at most"][end];
    const text = labelAt(axis, places[end] / last);
    return html`<label><span>${said}</span> <input type="range" min="0" max=${last} step="1" value=${places[end]} aria-label=${`${axis.name} ${said}`} aria-valuetext=${text}
      onInput=${(/** @type {any} */ { target }) => {
        const wanted = Number(target.value);
        const now = /** @type {[number, number]} */ (end ? [places[0], Math.max(wanted, places[0])] : [Math.min(wanted, places[1]), places[1]]);
        target.value = now[end]; // One end stops at the other.
        set(axis, rangeOf(axis, ...now));
      }}
      onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
        if (!["Delete", "Backspace", "Escape"].includes(event.key)) return;
        event.preventDefault();
        set(axis, null);
      }} /> <span class="value" aria-hidden="true">${text}</span></label>`;
  }
  const shown = axes.filter((axis) => lastPlace(axis) >= 1);
  return html`<details class="ranges"><summary>Ranges</summary>
    <p class="muted">Each axis has two sliders, for its ends. Arrows move one, Page up and Page down by more, Home and End to its limit; Delete or Escape gives the whole axis back.</p>
    <p role="status">${status}</p>
    <div>${shown.map((axis) => html`<fieldset key=${axis.name}><legend title=${axis.name}>${axis.name}</legend>
      ${slider(axis, 0)} ${slider(axis, 1)}
      <button aria-label=${`Whole axis of ${axis.name}`} onClick=${() => set(axis, null)}>Whole axis</button></fieldset>`)}</div>
  </details>`;
}
