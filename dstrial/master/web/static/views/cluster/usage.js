// How many slots were in use over the last hours.

import { html, useEffect, useMemo } from "htm/preact/standalone";
import { get } from "../../api.js";
import { number } from "../../format.js";
import { Chart } from "../../parts/chart.js";
import { Problem } from "../../parts/basics.js";
import { useLive } from "../../live.js";
import { useParam } from "../../router.js";

/** Hours, and what they are counted in. @type {(hours: number) => [string, number]} */
const unitOf = (hours) => (hours <= 1 ? ["minutes", 60_000] : hours <= 24 ? ["hours", 3_600_000] : ["days", 86_400_000]);
const PERIODS = /** @type {[string, string][]} */ ([["1", "hour"], ["6", "6 hours"], ["24", "day"], ["168", "week"], ["744", "month"]]);
const AGAIN_MS = 60_000;

export function Usage() {
  const [hours, setHours] = useParam("hours", "24");
  const [unit, size] = unitOf(Number(hours));
  const { data, error, reload } = useLive((signal) => get("/page/cluster/usage", { hours }, signal), (topic) => topic === "scheduler", [hours]);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || reload(), AGAIN_MS); // Time goes on, also where nothing happens.
    return () => clearInterval(timer);
  }, []);
  const curves = useMemo(() => {
    if (!data) return [];
    const { times, used, slots, now } = data;
    const xs = times.map((/** @type {number} */ ms) => (ms - now) / size);
    return [
      { id: "used", label: "in use", xs, ys: used },
      { id: "slots", label: "slots now", xs: [xs[0], 0], ys: [slots, slots] },
    ];
  }, [data, size]);
  const mean = data ? data.used.reduce((/** @type {number} */ sum, /** @type {number} */ one) => sum + one, 0) / data.used.length : 0;
  return html`<h2>Use</h2>
    <${Problem} error=${error} />
    <div class="tools"><label>Over the last <select value=${hours} onChange=${(/** @type {any} */ event) => setHours(event.target.value)}>
      ${PERIODS.map(([value, text]) => html`<option value=${value}>${text}</option>`)}
    </select></label>
    ${data && html`<span class="muted">${mean.toFixed(2)} of ${data.slots} slots in use on average${data.slots ? `, ${Math.round((100 * mean) / data.slots)} %` : ""}</span>`}</div>
    <${Chart} title="Slots in use" xLabel=${`${unit} ago`} curves=${curves} showX=${(/** @type {number} */ x) => number(-x, 3)} isFromZero height=${220} />`;
}
