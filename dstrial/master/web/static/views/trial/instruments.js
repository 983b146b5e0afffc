// A trial's newest telemetry: speed, parts of a batch's time, and memory, by rank.

import { html, useState } from "htm/preact/standalone";
import { get } from "../../api.js";
import { bytes, number, toNumber } from "../../format.js";
import { ofTrial, useLive } from "../../live.js";
import { Pending, Problem, Time } from "../../parts/basics.js";
import { isDark } from "../../parts/chart.js";

// The names are from dstrial.telemetry.samples; docs/reference/telemetry.md explains them.
/** @type {[string, string, string, string][]} metric, title, colour on a light page, colour on a dark page */
const PARTS = [
  ["data_wait_ms", "data wait", "#b4460f", "#ffa15c"],
  ["forward_ms", "forward", "#1f5fd0", "#79a8ff"],
  ["backward_ms", "backward", "#1a7f5a", "#58d0a0"],
  ["step_ms", "step", "#8a3ffc", "#c59bff"],
  ["stages_ms", "stages", "#a8324a", "#ff8fa3"],
  ["other_ms", "other", "#6b7480", "#8a94a3"],
];
/** @type {[string, string, (value: number) => string][]} metric, title, function that formats the value */
const NUMBERS = [
  ["records_per_second", "records a second", (value) => number(value, 4)],
  ["tokens_per_second", "tokens a second", (value) => number(value, 4)],
  ["batch_ms", "a batch", (value) => `${number(value, 4)} ms`],
  ["mfu", "MFU", (value) => `${number(100 * value, 3)} %`],
  ["hfu", "HFU", (value) => `${number(100 * value, 3)} %`],
  ["model_tflops_per_device", "TFLOPS a device", (value) => number(value, 4)],
  ["gradient_norm", "gradient norm", (value) => number(value, 4)],
  ["learning_rate", "learning rate", (value) => number(value, 4)],
  ["skipped_steps", "skipped steps", (value) => number(value)],
];
const MAX_RANKS = 64; // shown before the button "Show all"

/** @param {string} name @returns {string} */
const words = (name) => name.replace(/_bytes$|_ms$/, "").replaceAll("_", " ");
/** A bar for each rank, divided into parts. @param {{ title: string, rows: { rank: number, text: string, parts: { name: string, share: number, colour: string, text: string }[] }[] }} props */
function Bars({ title, rows }) {
  const [limit, setLimit] = useState(MAX_RANKS);
  return html`<table class="plain bars" aria-label=${title}><tbody>
    ${rows.slice(0, limit).map((row) => html`<tr><th scope="row">rank ${row.rank}</th><td class="bar">${row.parts.map(
      (part) => html`<span role="img" aria-label=${part.text} title=${part.text} style=${{ width: `${100 * part.share}%`, background: part.colour }}></span>`,
    )}</td><td class="number">${row.text}</td></tr>`)}
  </tbody></table>
  ${rows.length > limit && html`<button onClick=${() => setLimit(rows.length)}>Show all ${rows.length} ranks</button>`}`;
}

/** @param {{ ranks: Record<string, any[]> }} props */
function TimeByRank({ ranks }) {
  const isNight = isDark();
  const parts = PARTS.filter(([name]) => ranks[name]);
  if (!parts.length) return null;
  const count = Math.max(...parts.map(([name]) => ranks[name].length));
  const value = (/** @type {string} */ name, /** @type {number} */ rank) => {
    const found = toNumber(ranks[name]?.[rank] ?? 0);
    return Number.isFinite(found) ? found : 0;
  };
  const sums = Array.from({ length: count }, (_, rank) => parts.reduce((sum, [name]) => sum + value(name, rank), 0));
  const most = Math.max(...sums) || 1;
  const rows = sums.map((sum, rank) => ({
    rank,
    text: `${number(sum, 4)} ms`,
    parts: parts.map(([name, title, light, dark]) => ({ name, share: value(name, rank) / most, colour: isNight ? dark : light, text: `${title} ${number(value(name, rank), 4)} ms` })),
  }));
  return html`<h2>Where a batch's time goes, by rank</h2>
    <p class="legend">${parts.map(([, title, light, dark]) => html`<span><i style=${{ background: isNight ? dark : light }}></i>${title}</span>`)}</p>
    <${Bars} title="Time of a batch by rank" rows=${rows} />`;
}

/** @param {{ name: string, values: any[] }} props */
function MemoryByRank({ name, values }) {
  const sizes = values.map((value) => (value === null ? NaN : toNumber(value)));
  const most = Math.max(...sizes.filter(Number.isFinite), 1);
  const colour = isDark() ? "#79a8ff" : "#1f5fd0";
  const rows = sizes.map((size, rank) => ({ rank, text: Number.isFinite(size) ? bytes(size) : "unknown", parts: Number.isFinite(size) ? [{ name, share: size / most, colour, text: bytes(size) }] : [] }));
  return html`<div><h3>${words(name)}</h3><${Bars} title=${`${words(name)} by rank`} rows=${rows} /></div>`;
}

/** @param {{ trial: any }} props */
export function Instruments({ trial }) {
  const { data, error } = useLive(
    (signal) => get(`/page/trials/${trial.id}/instruments`, {}, signal),
    ofTrial(trial.id),
    [trial.id],
  );
  if (!data) return html`<${Pending} error=${error} />`;
  const { report } = data;
  if (!report)
    return html`<${Problem} error=${error} /><p class="muted">This trial has reported no instruments. A DeepSpeedTrial reports them with its training metrics unless <code>telemetry: false</code> stands under <code>data.dstrial</code>.</p>`;
  const { values, ranks } = report;
  const names = Object.keys(ranks);
  const numRanks = Math.max(0, ...names.map((name) => ranks[name].length));
  const memory = names.filter((name) => name.endsWith("_bytes"));
  return html`
    <${Problem} error=${error} />
    <p class="muted">At batch ${report.batches}, <${Time} at=${report.time} />, run ${report.run}, ${numRanks} ${numRanks === 1 ? "rank" : "ranks"}${values.timed_by && html`; timed by ${values.timed_by}`}.</p>
    <dl class="numbers">${NUMBERS.filter(([name]) => values[name] !== undefined).map(
      ([name, title, show]) => html`<div><dt>${title}</dt><dd>${show(toNumber(values[name]))}</dd></div>`,
    )}</dl>
    <${TimeByRank} ranks=${ranks} />
    ${memory.length > 0 && html`<h2>Memory by rank</h2><div class="charts">${memory.map((name) => html`<${MemoryByRank} key=${name} name=${name} values=${ranks[name]} />`)}</div>`}`;
}
