// A chart for each metric of a trial, by group.

import { html, useMemo, useState } from "htm/preact/standalone";
import { isEnded } from "../../actions.js";
import { recordsOf, useCurves, useChartOptions, useMetricNames, xsOf } from "../../curves.js";
import { withUnit } from "../../format.js";
import { Problem, useStored } from "../../parts/basics.js";
import { Chart } from "../../parts/chart.js";
import { useParam } from "../../router.js";
import { marksOf } from "./runs.js";

const CHARTS_AT_FIRST = 24; // and with each press of "Show more"
const CHART_PX = 220;
const FOLD = "telemetry and counters";

/** Telemetry and Determined's counters, which are folded away. */
const FOLDED = /^telemetry\.|\.(batches|epochs|(batches|records|tokens)_per_second)$/;

/** @param {{ trial: any, experiment: any, runs: any[], metrics: any, baseline: number | null }} props */
export function Metrics({ trial, experiment, runs, metrics, baseline }) {
  const [text, setText] = useParam("find");
  const [limit, setLimit] = useState(CHARTS_AT_FIRST);
  const all = useMetricNames(metrics);
  const [pins, setPins] = useStored("pinned metrics", /** @type {string[]} */ ([]));
  const searched = `.${experiment.metric}`;
  const names = useMemo(() => {
    const rank = (/** @type {string} */ name) => (pins.includes(name) ? 0 : name.endsWith(searched) ? 1 : FOLDED.test(name) ? 3 : 2);
    return [...all].sort((a, b) => rank(a) - rank(b));
  }, [all, pins, searched]);
  const records = useMemo(() => recordsOf({ records_per_epoch: trial.recordsPerEpoch }, trial.hparams), [trial.recordsPerEpoch, trial.hparams?.global_batch_size]);
  const { options, tools } = useChartOptions(records);
  const marks = useMemo(() => marksOf(runs, options.axis, records, trial.start), [JSON.stringify(runs.map((run) => [run.fromBatch, run.slots, run.exitCode])), options.axis, records, trial.start]);
  const found = useMemo(() => (text ? names.filter((name) => name.toLowerCase().includes(text.toLowerCase())) : names), [names, text]);
  const shown = found.slice(0, limit);
  const groupOf = (/** @type {string} */ name) => (pins.includes(name) ? "pinned" : !text && FOLDED.test(name) ? FOLD : name.slice(0, name.indexOf(".")));
  const groups = [...new Set(shown.map(groupOf))];
  const chart = (/** @type {string} */ name, /** @type {string} */ group) => {
    const [own, short] = [name.slice(0, name.indexOf(".")), name.slice(name.indexOf(".") + 1)];
    const title = `${group === own || own === "telemetry" ? "" : `${own}: `}${own === "telemetry" ? withUnit(short) : short}`;
    const isPinned = pins.includes(name);
    const verb = isPinned ? "Unpin" : "Pin";
    const pin = html`<button aria-label=${`${verb} ${title}`} title="Pinned metrics come first, for every trial" onClick=${() => setPins(isPinned ? pins.filter((one) => one !== name) : [...pins, name])}>${verb}</button>`;
    return html`<div key=${name}><${TrialChart} trial=${trial} metric=${name} title=${title} options=${options} records=${records} marks=${marks} baseline=${baseline} tools=${pin} /></div>`;
  };
  const charts = (/** @type {string} */ group) => html`<div class="charts">${shown.filter((name) => groupOf(name) === group).map((name) => chart(name, group))}</div>`;
  const total = `${found.length.toLocaleString()}${metrics.more ? " or more" : ""} ${found.length === 1 ? "metric" : "metrics"}`;
  return html`
    <div class="filters">
      <input type="search" aria-label="Find metrics" placeholder="Find metrics by name" value=${text} onInput=${(/** @type {any} */ event) => { setLimit(CHARTS_AT_FIRST); setText(event.target.value); }} />
      ${tools}
      <span class="muted" role="status">${total}</span>
    </div>
    ${marks.length > 0 && html`<p class="muted">Dashed lines are where the trial was started again: ${marks.map((mark) => mark.text).slice(-6).join("; ")}.</p>`}
    ${groups.map((group) => (group === FOLD ? html`<details class="fold"><summary><h2>${FOLD}</h2></summary>${charts(group)}</details>` : html`<h2>${group}</h2>${charts(group)}`))}
    ${!found.length && html`<p class="muted">${text ? "No metric has this name." : isEnded(trial) ? "Nothing was reported." : "Nothing has been reported yet; charts appear here as the trial reports."}</p>`}
    ${found.length > limit && html`<p><button onClick=${() => setLimit(limit + CHARTS_AT_FIRST)}>Show ${Math.min(CHARTS_AT_FIRST, found.length - limit)} more of ${(found.length - limit).toLocaleString()}</button></p>`}
    ${metrics.more && html`<p class="muted">There are more metrics than are listed.</p>`}`;
}

/** @typedef {ReturnType<typeof import("../../curves.js").useChartOptions>["options"]} Options how curves are drawn */

/** @param {{ trial: any, metric: string, title: string, options: Options, records: { perBatch: number, perEpoch: number }, marks: any[], baseline: number | null, tools: unknown }} props */
function TrialChart({ trial, metric, title, options, records, marks, baseline, tools }) {
  const ids = useMemo(() => (baseline === null ? [trial.id] : [trial.id, baseline]), [trial.id, baseline]);
  const { series, isLoading, error } = useCurves(ids, metric);
  const own = series.get(trial.id);
  const other = baseline === null ? undefined : series.get(baseline);
  const curves = useMemo(() => {
    // Count the baseline's time from its first report, as its start is not known here.
    const guide = other?.batches.length ? [{ id: other.trial, label: `baseline: trial ${other.trial}`, isGuide: true, xs: xsOf(other, options.axis, records, new Date(other.times[0]).toISOString()), ys: other.values }] : [];
    return own ? [...guide, { id: trial.id, label: `trial ${trial.id}`, colour: 0, xs: xsOf(own, options.axis, records, trial.start), ys: own.values }] : [];
  }, [own, other, options.axis, records.perBatch, records.perEpoch, trial.start]);
  return html`<${Problem} error=${error} /><${Chart} title=${title} xLabel=${options.label} curves=${curves} isLog=${options.isLog} smoothing=${options.smoothing}
    showX=${options.showX} marks=${marks} height=${CHART_PX} shared=${`trial ${trial.id}`} tools=${tools} isLoading=${isLoading} />
    ${own && own.points > own.values.length && html`<p class="muted">${own.values.length.toLocaleString()} of ${own.points.toLocaleString()} points are drawn.</p>`}`;
}
