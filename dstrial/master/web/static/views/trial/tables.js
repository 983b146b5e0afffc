// What a trial was given and what it left: hyperparameters, checkpoints, and its runs on slots.

import { html, useMemo } from "htm/preact/standalone";
import { get } from "../../api.js";
import { bytes, duration, flat, number, plain, secondsBetween } from "../../format.js";
import { useLive } from "../../live.js";
import { Copy, Problem, State, Time } from "../../parts/basics.js";
import { Table } from "../../parts/table.js";
import { whyAgain } from "./marks.js";

/** @param {{ trial: any }} props */
export function Hyperparameters({ trial }) {
  const rows = useMemo(() => Object.entries(flat(trial.hparams)).map(([name, value]) => ({ id: name, value })), [trial.hparams]);
  const columns = useMemo(
    () => [
      { id: "name", title: "Hyperparameter", value: (/** @type {any} */ row) => row.id },
      { id: "value", title: "Value", value: (/** @type {any} */ row) => (typeof row.value === "object" ? plain(row.value) : row.value), show: (/** @type {any} */ row) => html`<span title=${plain(row.value)}>${plain(row.value)}</span>` },
    ],
    [],
  );
  return html`<${Table} name="hparams" label="Hyperparameters" columns=${columns} rows=${rows} empty="The trial has none." />`;
}

/** @param {any} one as Determined's protocol has it */
function checkpointRow(one) {
  const sizes = Object.values(one.resources ?? {});
  return {
    id: one.uuid,
    state: String(one.state).replace("STATE_", ""),
    batches: one.metadata?.steps_completed,
    metric: one.training?.searcherMetric,
    bytes: sizes.reduce((sum, size) => sum + Number(size), 0),
    files: sizes.length,
    time: one.reportTime,
  };
}

const MOST_CHECKPOINTS = 1000;

/** @param {{ trial: any, experiment: any }} props */
export function Checkpoints({ trial, experiment }) {
  const { data, error } = useLive(
    async (signal) => {
      const found = await get(`/api/v1/trials/${trial.id}/checkpoints`, { limit: MOST_CHECKPOINTS, sortByAttr: "SORT_BY_BATCH_NUMBER", orderBy: "ORDER_BY_DESC" }, signal);
      return { rows: found.checkpoints.map(checkpointRow), total: found.pagination?.total ?? found.checkpoints.length };
    },
    (topic) => topic === `trial:${trial.id}` || topic === `experiment:${trial.experiment}`,
    [trial.id],
  );
  const columns = useMemo(
    () => [
      { id: "batches", title: "Batches", isNumber: true, value: (/** @type {any} */ row) => row.batches },
      { id: "uuid", title: "Checkpoint", value: (/** @type {any} */ row) => row.id, show: (/** @type {any} */ row) => html`<${Copy} text=${row.id} />${row.id === trial.bestCheckpoint && html` <span class="muted">best</span>`}` },
      { id: "state", title: "State", value: (/** @type {any} */ row) => row.state, show: (/** @type {any} */ row) => html`<${State} state=${row.state} />` },
      { id: "metric", title: experiment.metric, isNumber: true, value: (/** @type {any} */ row) => row.metric, show: (/** @type {any} */ row) => number(row.metric) },
      { id: "size", title: "Size", isNumber: true, value: (/** @type {any} */ row) => row.bytes, show: (/** @type {any} */ row) => bytes(row.bytes) },
      { id: "files", title: "Files", isNumber: true, isHidden: true, value: (/** @type {any} */ row) => row.files },
      { id: "time", title: "Saved", value: (/** @type {any} */ row) => row.time, show: (/** @type {any} */ row) => html`<${Time} at=${row.time} />` },
      { id: "get", title: "Get it", value: (/** @type {any} */ row) => `det checkpoint download ${row.id}`, show: (/** @type {any} */ row) => (row.state === "COMPLETED" ? html`<${Copy} text=${`det checkpoint download ${row.id}`} label="det checkpoint download …" />` : "") },
    ],
    [trial.bestCheckpoint, experiment.metric],
  );
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`;
  return html`<${Problem} error=${error} />
    <${Table} name="checkpoints" label="Checkpoints" columns=${columns} rows=${data.rows} sort="-batches" empty="No checkpoint has been saved yet." />
    ${data.total > data.rows.length && html`<p class="muted">The newest ${data.rows.length} of ${data.total} are listed.</p>`}`;
}

/** @param {{ runs: import("./marks.js").Run[] }} props */
export function Runs({ runs }) {
  const rows = useMemo(() => runs.map((run, idx) => ({ ...run, id: run.run, why: idx ? whyAgain(runs[idx - 1], run) : "first" })), [runs]);
  const columns = useMemo(
    () => [
      { id: "run", title: "Run", isNumber: true, value: (/** @type {any} */ row) => row.run },
      { id: "why", title: "Why", value: (/** @type {any} */ row) => row.why },
      { id: "start", title: "Began", value: (/** @type {any} */ row) => row.start, show: (/** @type {any} */ row) => html`<${Time} at=${row.start} />` },
      { id: "took", title: "Took", isNumber: true, value: (/** @type {any} */ row) => secondsBetween(row.start, row.end), show: (/** @type {any} */ row) => duration(secondsBetween(row.start, row.end)) },
      { id: "slots", title: "Slots", isNumber: true, value: (/** @type {any} */ row) => row.slots },
      { id: "nodes", title: "On", value: (/** @type {any} */ row) => row.nodes },
      { id: "from", title: "From batch", isNumber: true, value: (/** @type {any} */ row) => row.fromBatch },
      { id: "checkpoint", title: "From checkpoint", value: (/** @type {any} */ row) => row.checkpoint, show: (/** @type {any} */ row) => (row.checkpoint ? html`<${Copy} text=${row.checkpoint} label=${row.checkpoint.slice(0, 8)} />` : "") },
      { id: "code", title: "Exit code", isNumber: true, value: (/** @type {any} */ row) => row.exitCode },
      { id: "reason", title: "How it ended", value: (/** @type {any} */ row) => (row.end ? row.reason : "runs"), show: (/** @type {any} */ row) => html`<span title=${row.reason}>${row.end ? row.reason || (row.exitCode ? "failed" : "ended") : "runs"}</span>` },
    ],
    [],
  );
  return html`<${Table} name="runs" label="Runs" columns=${columns} rows=${rows} sort="run" empty="The trial has not been started yet." />`;
}
