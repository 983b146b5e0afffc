// The runs of a trial on slots: a table, and marks on charts where the trial was started again.

import { html, useMemo } from "htm/preact/standalone";
import { xsOf } from "../../curves.js";
import { Copy } from "../../parts/basics.js";
import { Table, timeColumn, tookColumn } from "../../parts/table.js";

/** A run of the trial on some slots. @typedef {{ run: number, start: string, end: string | null, fromBatch: number, checkpoint: string | null, slots: number, nodes: string, reason: string, exitCode: number | null }} Run */

const MAX_MARKS = 60; // the newest; more cannot be distinguished

/** @param {Run} before @param {Run} run the next run @returns {string} why the trial was started again */
function restartReason(before, run) {
  if (before.slots !== run.slots) return `${before.slots} → ${run.slots} slots`;
  return before.exitCode ? "restart" : "resumed";
}

/**
 * Return marks for a chart where the trial was started again; several at one place become one mark.
 *
 * @param {Run[]} runs in order @param {string} axis
 * @param {{ perBatch: number, perEpoch: number }} records @param {string} start when the trial started
 * @returns {import("../../parts/chart.js").Mark[]}
 */
export function marksOf(runs, axis, records, start) {
  /** @type {Map<number, string[]>} */
  const found = new Map();
  const xs = xsOf({ batches: runs.map((run) => run.fromBatch), times: runs.map((run) => Date.parse(run.start)) }, axis, records, start);
  runs.forEach((run, idx) => {
    if (idx) found.set(xs[idx], [...(found.get(xs[idx]) ?? []), restartReason(runs[idx - 1], run)]);
  });
  const marks = [...found].map(([x, texts]) => ({ x, text: texts.length > 3 ? `${texts.length} starts` : texts.join(", ") }));
  return marks.slice(-MAX_MARKS);
}

/** The table of a trial's runs. @param {{ runs: Run[] }} props */
export function Runs({ runs }) {
  const rows = useMemo(() => runs.map((run, idx) => ({ ...run, id: run.run, why: idx ? restartReason(runs[idx - 1], run) : "first" })), [runs]);
  const columns = useMemo(
    () => /** @type {import("../../parts/table.js").Column[]} */ ([
      { id: "run", title: "Run", isNumber: true, value: (row) => row.run },
      { id: "why", title: "Why", value: (row) => row.why },
      timeColumn("start", "Began", "start"),
      tookColumn(),
      { id: "slots", title: "Slots", isNumber: true, value: (row) => row.slots },
      { id: "nodes", title: "On", value: (row) => row.nodes },
      { id: "from", title: "From batch", isNumber: true, value: (row) => row.fromBatch },
      { id: "checkpoint", title: "From checkpoint", value: (row) => row.checkpoint, show: (row) => (row.checkpoint ? html`<${Copy} text=${row.checkpoint} label=${row.checkpoint.slice(0, 8)} />` : "") },
      { id: "code", title: "Exit code", isNumber: true, value: (row) => row.exitCode },
      { id: "reason", title: "How it ended", value: (row) => (row.end ? row.reason : "runs"), show: (row) => html`<span title=${row.reason}>${row.end ? row.reason || (row.exitCode ? "failed" : "ended") : "runs"}</span>` },
    ]),
    [],
  );
  return html`<${Table} name="runs" label="Runs" columns=${columns} rows=${rows} sort="run" empty="The trial has not been started yet." />`;
}
