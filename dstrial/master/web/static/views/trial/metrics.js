// Every metric of a trial, by group, with a chart for each.

import { html, useMemo, useState } from "htm/preact/standalone";
import { recordsOf, useLook, useMetricNames } from "../../curves.js";
import { useParam } from "../../router.js";
import { marksOf } from "./marks.js";
import { TrialChart, WhenSeen } from "./series.js";

const AT_ONCE = 24;
const CHART_PX = 220;

/** @param {{ trial: any, runs: any[], metrics: any }} props */
export function Metrics({ trial, runs, metrics }) {
  const [text, setText] = useParam("find");
  const [limit, setLimit] = useState(AT_ONCE);
  const names = useMetricNames(metrics);
  const records = useMemo(() => recordsOf({ records_per_epoch: trial.recordsPerEpoch }, trial.hparams), [trial.recordsPerEpoch, trial.hparams?.global_batch_size]);
  const { look, tools } = useLook(records);
  const marks = useMemo(() => marksOf(runs, look.axis, records, trial.start), [JSON.stringify(runs.map((run) => [run.fromBatch, run.slots, run.exitCode])), look.axis, records, trial.start]);
  const found = useMemo(() => (text ? names.filter((name) => name.toLowerCase().includes(text.toLowerCase())) : names), [names, text]);
  const shown = found.slice(0, limit);
  const groups = [...new Set(shown.map((name) => name.slice(0, name.indexOf("."))))];
  const total = `${found.length.toLocaleString()}${metrics.more ? " or more" : ""} ${found.length === 1 ? "metric" : "metrics"}`;
  return html`
    <div class="filters">
      <input type="search" aria-label="Find metrics" placeholder="Find metrics by name" value=${text} onInput=${(/** @type {any} */ event) => { setLimit(AT_ONCE); setText(event.target.value); }} />
      ${tools}
      <span class="muted" role="status">${total}</span>
    </div>
    ${marks.length > 0 && html`<p class="muted">Dashed lines are where the trial was started again: ${marks.map((mark) => mark.text).slice(-6).join("; ")}.</p>`}
    ${groups.map((group) => html`<h2>${group}</h2><div class="charts">
      ${shown.filter((name) => name.startsWith(`${group}.`)).map((name) => html`<div key=${name}><${WhenSeen} height=${CHART_PX}>
        <${TrialChart} trial=${trial} metric=${name} title=${name.slice(group.length + 1)} look=${look} records=${records} marks=${marks} height=${CHART_PX} /><//></div>`)}
    </div>`)}
    ${!found.length && html`<p class="muted">${text ? "No metric has this name." : "Nothing has been reported yet; charts appear here as the trial reports."}</p>`}
    ${found.length > limit && html`<p><button onClick=${() => setLimit(limit + AT_ONCE)}>Show ${Math.min(AT_ONCE, found.length - limit)} more of ${(found.length - limit).toLocaleString()}</button></p>`}
    ${metrics.more && html`<p class="muted">There are more metrics than are listed.</p>`}`;
}
