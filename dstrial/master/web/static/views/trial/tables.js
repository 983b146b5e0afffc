// What a trial was given and how it ran: hyperparameters, and its runs on slots.

import { html, useMemo } from "htm/preact/standalone";
import { duration, flat, plain, secondsBetween } from "../../format.js";
import { Copy, Time } from "../../parts/basics.js";
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
