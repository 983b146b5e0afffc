// A chart with the curves of all trials, and a table of the trials with their hyperparameters.

import { html, useMemo, useState } from "htm/preact/standalone";
import { recordsOf, useCurves, useChartOptions, useMetricNames, xsOf } from "../../curves.js";
import { bytes, flat, number, plain, shortNames } from "../../format.js";
import { Problem, Progress, SearchField, Select, State } from "../../parts/basics.js";
import { Chart } from "../../parts/chart.js";
import { filterRows, valueByName } from "../../parts/filter.js";
import { Table, timeColumn, tookColumn } from "../../parts/table.js";
import { navigate, useParam } from "../../router.js";

const MAX_CURVES = 300;
const MAX_HPS_IN_LABEL = 3; // hyperparameters in the label of a curve

/** @param {any} row @param {boolean} isSmaller whether smaller is better @returns {number} sort key that puts the best trial first */
const sortKey = (row, isSmaller) => (typeof row.best === "number" ? (isSmaller ? row.best : -row.best) : Infinity);

/** @param {any[]} trials @returns {{ names: string[], numDiffering: number }} names of hyperparameters; the first `numDiffering` differ between trials */
function hyperparameterNames(trials) {
  /** @type {Map<string, Set<string>>} */
  const values = new Map();
  for (const trial of trials)
    for (const [name, value] of Object.entries(trial.hp)) {
      if (!values.has(name)) values.set(name, new Set());
      const own = /** @type {Set<string>} */ (values.get(name));
      if (own.size < 2) own.add(JSON.stringify(value));
    }
  const differs = (/** @type {string} */ name) => (values.get(name)?.size ?? 0) > 1;
  const names = [...values.keys()].sort((a, b) => Number(differs(b)) - Number(differs(a)) || a.localeCompare(b));
  return { names, numDiffering: names.filter(differs).length };
}

/** @param {{ id: number, experiment: any, metrics: any, trials: any[] }} props */
export function Overview({ id, experiment, metrics, trials }) {
  const names = useMetricNames(metrics);
  const wanted = `validation.${experiment.metric}`;
  const [metric, setMetric] = useParam("metric", names.includes(wanted) ? wanted : (names[0] ?? wanted));
  const [text, setText] = useParam("trials");
  const [selected, setSelected] = useState(/** @type {Set<number>} */ (new Set()));
  const all = useMemo(() => trials.map((row) => ({ ...row, hp: flat(row.hparams) })), [trials]);
  const { options, tools } = useChartOptions(recordsOf(experiment.config, all[0]?.hparams));
  const { names: hpNames, numDiffering } = useMemo(() => hyperparameterNames(all), [all]);
  const short = useMemo(() => shortNames(hpNames), [hpNames.join(",")]);
  const rows = useMemo(
    () =>
      filterRows(
        text,
        all,
        (row, name) => valueByName({ id: row.id, state: row.state, best: row.best, batches: row.batches, restarts: row.restarts }, row.hp, name),
        (row) => `${row.id} ${row.state} ${Object.entries(row.hp).map(([name, value]) => `${name} ${plain(value)}`).join(" ")}`,
      ),
    [all, text],
  );
  const order = useMemo(() => [...rows].sort((a, b) => sortKey(a, experiment.smallerIsBetter) - sortKey(b, experiment.smallerIsBetter) || a.id - b.id).map((row) => row.id).slice(0, MAX_CURVES), [rows.map((row) => row.id).join(","), experiment.smallerIsBetter]);
  const { series, isLoading, error } = useCurves(order, metric);
  const best = all.find((row) => row.id === experiment.bestTrial && row.state !== "ERROR")?.id;
  const byId = useMemo(() => new Map(all.map((row) => [row.id, row])), [all]);
  const curves = useMemo(
    () =>
      order
        .filter((one) => series.has(one) && (!selected.size || selected.has(one)))
        .sort((a, b) => a - b)
        .map((one, colour) => {
          const trial = byId.get(one);
          const values = hpNames.slice(0, Math.min(numDiffering, MAX_HPS_IN_LABEL)).map((name) => `${short.get(name)} ${plain(trial?.hp[name])}`);
          const found = /** @type {import("../../curves.js").Series} */ (series.get(one));
          return {
            id: one, colour, label: [`trial ${one}${one === best ? " (best)" : ""}`, ...values].join(", "), ys: found.values, isBest: one === best, href: `/det/experiments/${id}/trials/${one}`,
            xs: xsOf(found, options.axis, recordsOf(experiment.config, trial?.hparams), trial?.start ?? experiment.start),
          };
        }),
    [series, order, options.axis, best, id, hpNames.join(","), numDiffering, selected],
  );
  // Searchers also stop trials at their full length, which are not shown as stopped.
  const maxBatches = Math.max(0, ...all.map((row) => row.batches));
  const isStopped = (/** @type {any} */ row) => row.stoppedBySearcher && row.batches < maxBatches;
  const columns = useMemo(
    () => /** @type {import("../../parts/table.js").Column[]} */ ([
      { id: "id", title: "Trial", isNumber: true, value: (row) => row.id, show: (row) => `${row.id}${row.id === best ? " ★" : ""}` },
      { id: "state", title: "State", value: (row) => (isStopped(row) ? "STOPPED BY SEARCHER" : row.state), show: (row) => html`<${State} state=${row.state} />${isStopped(row) && html` <span class="muted">stopped by searcher</span>`}` },
      { id: "best", title: `Best ${experiment.metric}`, isNumber: true, value: (row) => row.best, show: (row) => number(row.best) },
      ...hpNames.map((name, idx) => ({ id: `hp.${name}`, title: short.get(name) ?? name, hint: name, isHidden: idx >= 8 || (all.length > 1 && idx >= numDiffering), isNumber: typeof all[0]?.hp[name] === "number", value: (/** @type {any} */ row) => row.hp[name], show: (/** @type {any} */ row) => plain(row.hp[name]) })),
      { id: "batches", title: "Batches", isNumber: true, value: (row) => row.batches },
      { id: "progress", title: "Progress", isHidden: true, value: (row) => row.progress, show: (row) => html`<${Progress} value=${row.progress} state=${row.state} />` },
      { id: "latest", title: "Latest", isHidden: true, isNumber: true, value: (row) => row.latest, show: (row) => number(row.latest) },
      { id: "bestBatch", title: "Best at batch", isHidden: true, isNumber: true, value: (row) => row.bestBatch },
      { id: "restarts", title: "Restarts", isNumber: true, value: (row) => row.restarts },
      { id: "slots", title: "Slots", isHidden: true, isNumber: true, value: (row) => row.slots },
      { id: "checkpoints", title: "Checkpoints", isHidden: true, isNumber: true, value: (row) => row.checkpoints },
      { id: "size", title: "Size", isHidden: true, isNumber: true, value: (row) => row.checkpointBytes, show: (row) => bytes(row.checkpointBytes) },
      timeColumn("start", "Started", "start", { isHidden: true }),
      tookColumn(),
    ]),
    [hpNames, numDiffering, best, maxBatches, experiment.metric],
  );
  return html`
    <div class="filters">
      <label>Metric <${Select} value=${metric} set=${setMetric}>
        ${!names.includes(metric) && html`<option>${metric}</option>`}
        ${names.map((name) => html`<option value=${name}>${name.replace(".", ": ")}</option>`)}
      <//></label>
      ${tools}
      ${isLoading && html`<span class="muted">Loading curves …</span>`}
      ${metrics.more && html`<span class="muted">There are more metrics than are listed.</span>`}
    </div>
    <${Problem} error=${error} />
    <${Chart} title=${metric.replace(".", ": ")} xLabel=${options.label} curves=${curves} isLog=${options.isLog} smoothing=${options.smoothing}
      showX=${options.showX} onOpen=${navigate} />
    ${selected.size > 0 && html`<p class="muted">Only the ${selected.size} selected ${selected.size === 1 ? "trial is" : "trials are"} drawn.</p>`}
    <h2>Trials</h2>
    <div class="filters"><${SearchField} text=${text} set=${setText} label="Filter trials" placeholder="Filter: state:running, lr<0.01, best<=0.5" /></div>
    <${Table} name="trials" label="Trials" columns=${columns} rows=${rows} sort=${experiment.smallerIsBetter ? "best" : "-best"} selected=${selected} onSelect=${setSelected}
      href=${(/** @type {any} */ row) => `/det/experiments/${id}/trials/${row.id}`} rowClass=${(/** @type {any} */ row) => (row.id === best ? "best" : "")}
      tools=${selected.size > 1 && html`<button onClick=${() => navigate(`/det/compare?trials=${[...selected].join(",")}`)}>Compare ${selected.size}</button>`}
      empty=${all.length ? "No trial fits the filter." : "No trials yet."} />`;
}
