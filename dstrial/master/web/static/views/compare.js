// Compare trials: curves of chosen metrics, hyperparameters, and diffs of their experiments' configs and code.

import { html, useMemo, useState } from "htm/preact/standalone";
import { get } from "../api.js";
import { recordsOf, useCurves, useChartOptions, useMetricNames, xsOf } from "../curves.js";
import { duration, flat, number, plain, secondsBetween } from "../format.js";
import { ofExperiment, ofTrial, useLive } from "../live.js";
import { Check, Pending, Problem, State } from "../parts/basics.js";
import { Chart, colour } from "../parts/chart.js";
import { Difference } from "../parts/lines.js";
import { navigate, setParams, useLocation, useParam } from "../router.js";

/** @param {string | null} text ids separated by commas @returns {number[]} */
const idsIn = (text) => [...new Set((text ?? "").split(",").filter((word) => /^\d{1,9}$/.test(word)).map(Number))];

/** @param {{ metric: string, trials: any[], experiments: Map<number, any>, options: ReturnType<typeof useChartOptions>["options"], onRemove?: () => void }} props */
function Overlay({ metric, trials, experiments, options, onRemove }) {
  const ids = useMemo(() => trials.map((trial) => trial.id), [trials.map((trial) => trial.id).join(",")]);
  const { series, isLoading, error } = useCurves(ids, metric);
  const curves = useMemo(
    () =>
      trials
        .filter((trial) => series.has(trial.id))
        .map((trial) => {
          const found = /** @type {import("../curves.js").Series} */ (series.get(trial.id));
          const experiment = experiments.get(trial.experiment);
          const records = recordsOf({ records_per_epoch: experiment?.recordsPerEpoch }, trial.hparams);
          return { id: trial.id, label: `trial ${trial.id} of ${experiment?.name ?? trial.experiment}`, xs: xsOf(found, options.axis, records, trial.start), ys: found.values, href: `/det/experiments/${trial.experiment}/trials/${trial.id}` };
        }),
    [series, trials, options.axis],
  );
  return html`<div>
    <${Problem} error=${error} />
    ${isLoading && !curves.length && html`<p class="muted">Loading curves …</p>`}
    <${Chart} title=${metric.replace(".", ": ")} xLabel=${options.label} curves=${curves} isLog=${options.isLog} smoothing=${options.smoothing} showX=${options.showX} onOpen=${navigate} height=${280} />
    ${onRemove && html`<button onClick=${onRemove} aria-label=${`Remove the chart of ${metric}`}>Remove this chart</button>`}
  </div>`;
}

/** @param {{ trials: any[], experiments: Map<number, any>, onRemove: (id: number) => void }} props */
function Facts({ trials, experiments, onRemove }) {
  const [isOnly, setOnly] = useState(true);
  const hps = useMemo(() => trials.map((trial) => flat(trial.hparams)), [trials]);
  const names = useMemo(() => [...new Set(hps.flatMap((hp) => Object.keys(hp)))].sort(), [hps]);
  const rows = names.map((name) => ({ name, values: hps.map((hp) => (name in hp ? plain(hp[name]) : "")), isSame: new Set(hps.map((hp) => JSON.stringify(hp[name]))).size === 1 }));
  const shown = isOnly && trials.length > 1 ? rows.filter((row) => !row.isSame) : rows;
  /** @type {[string, (trial: any) => unknown][]} */
  const facts = [
    ["experiment", (trial) => html`<a href=${`/det/experiments/${trial.experiment}`}>${experiments.get(trial.experiment)?.name} (${trial.experiment})</a>`],
    ["state", (trial) => html`<${State} state=${trial.state} />`],
    ["best", (trial) => (trial.best === null ? "" : `${experiments.get(trial.experiment)?.metric} ${number(trial.best)}`)],
    ["batches", (trial) => trial.batches.toLocaleString()],
    ["slots", (trial) => trial.slots],
    ["restarts", (trial) => trial.restarts],
    ["took", (trial) => duration(secondsBetween(trial.start, trial.end))],
  ];
  return html`<h2>Side by side</h2>
    ${trials.length > 1 && html`<div class="filters"><${Check} checked=${isOnly} set=${setOnly}>only hyperparameters that differ<//></div>`}
    <div class="scroller wide" tabindex="0" role="region" aria-label="Trials side by side"><table class="plain side">
      <thead><tr><th></th>${trials.map((trial, idx) => html`<th key=${trial.id}><i class="dot" style=${{ background: colour(idx) }}></i><a href=${`/det/experiments/${trial.experiment}/trials/${trial.id}`}>trial ${trial.id}</a> ${trials.length > 1 && html`<button aria-label=${`Remove trial ${trial.id}`} onClick=${() => onRemove(trial.id)}>×</button>`}</th>`)}</tr></thead>
      <tbody>
        ${facts.map(([name, show]) => html`<tr><th scope="row">${name}</th>${trials.map((trial) => html`<td>${show(trial)}</td>`)}</tr>`)}
        ${shown.map((row) => html`<tr class=${row.isSame ? "" : "differs"}><th scope="row">${row.name}${!row.isSame && html` <span title="differs" aria-label="differs">≠</span>`}</th>${row.values.map((value) => html`<td>${value}</td>`)}</tr>`)}
        ${!shown.length && html`<tr><td colspan=${trials.length + 1} class="muted">${rows.length ? "All hyperparameters are the same." : "There are no hyperparameters."}</td></tr>`}
      </tbody>
    </table></div>`;
}

export function Compare() {
  const { query } = useLocation();
  const trialIds = idsIn(query.get("trials"));
  const experimentIds = idsIn(query.get("experiments"));
  const key = `${trialIds.join(",")};${experimentIds.join(",")}`;
  const [chosen, setChosen] = useParam("metrics");
  const { options, tools } = useChartOptions();
  const isEmpty = !trialIds.length && !experimentIds.length;
  const { data, error } = useLive(
    async (signal) => (isEmpty ? null : get("/page/compare", { trials: trialIds, experiments: experimentIds }, signal)),
    (topic) => trialIds.some((id) => ofTrial(id)(topic)) || experimentIds.some((id) => ofExperiment(id)(topic)),
    [key],
  );
  const names = useMetricNames(data?.metrics ?? { groups: {} });
  const experiments = useMemo(() => new Map((data?.experiments ?? []).map((/** @type {any} */ one) => [one.id, one])), [data]);
  if (isEmpty) return html`<main><h1 tabindex="-1">Compare</h1><p>Choose trials in the table of an experiment, or experiments in their list, and press Compare.</p><p><a href="/det/experiments">Go to the experiments</a></p></main>`;
  if (!data) return html`<main><h1 tabindex="-1">Compare</h1><${Pending} error=${error} /></main>`;
  const { trials, missing } = data;
  const [first, second] = data.experiments;
  const fallback = first && (names.includes(`validation.${first.metric}`) ? `validation.${first.metric}` : names[0]);
  const metrics = chosen ? chosen.split(",").map(decodeURIComponent) : fallback ? [fallback] : [];
  /** @param {string[]} now */
  const choose = (now) => setChosen(now.map(encodeURIComponent).join(","));
  /** @param {number} id */
  const remove = (id) => setParams({ trials: trials.map((/** @type {any} */ one) => one.id).filter((/** @type {number} */ one) => one !== id).join(","), experiments: "" });
  const rest = names.filter((name) => !metrics.includes(name));
  return html`<main>
    <p class="back"><a href="/det/experiments">Experiments</a> /</p>
    <h1 tabindex="-1">Compare ${trials.length} ${trials.length === 1 ? "trial" : "trials"}</h1>
    <${Problem} error=${error} />
    ${missing.map((/** @type {string} */ text) => html`<p class="problem">${text}.</p>`)}
    ${trials.length > 0 && html`
      <div class="filters">
        <label>Add a metric <select value="" onChange=${(/** @type {any} */ event) => { if (event.target.value) choose([...metrics, event.target.value]); event.target.value = ""; }}>
          <option value="">choose …</option>${rest.map((name) => html`<option value=${name}>${name.replace(".", ": ")}</option>`)}</select></label>
        ${tools}
      </div>
      <div class=${metrics.length > 1 ? "charts" : ""}>${metrics.map((metric) => html`<${Overlay} key=${metric} metric=${metric} trials=${trials} experiments=${experiments} options=${options}
        onRemove=${metrics.length > 1 ? () => choose(metrics.filter((one) => one !== metric)) : undefined} />`)}</div>
      <${Facts} trials=${trials} experiments=${experiments} onRemove=${remove} />
      ${second && html`<h2>Configs of experiments ${first.id} and ${second.id}</h2><${Difference} id=${second.id} other=${first.id} kind="effective" />
        <h2>Code</h2><${Difference} id=${second.id} other=${first.id} kind="code" />`}`}
  </main>`;
}
