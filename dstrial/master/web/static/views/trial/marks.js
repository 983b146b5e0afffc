// Where a trial was started again, on the axis of its curves.

import { elapsed } from "../../format.js";

/**
 * @typedef {{ run: number, start: string, end: string | null, fromBatch: number, checkpoint: string | null, slots: number, nodes: string, reason: string, exitCode: number | null }} Run
 */

const MOST_MARKS = 60;

/** Why a run follows another. @param {Run} before @param {Run} run @returns {string} */
export function whyAgain(before, run) {
  if (before.slots !== run.slots) return `${before.slots} → ${run.slots} slots`;
  return before.exitCode ? "restart" : "resumed";
}

/**
 * @param {Run[]} runs in order @param {string} axis
 * @param {{ perBatch: number, perEpoch: number }} records @param {string} start of the trial
 * @returns {import("../../parts/chart.js").Mark[]} several at one place are one mark
 */
export function marksOf(runs, axis, records, start) {
  /** @type {Map<number, string[]>} */
  const found = new Map();
  const times = elapsed(runs.map((run) => Date.parse(run.start)), Date.parse(start));
  runs.forEach((run, idx) => {
    if (!idx) return;
    let x = run.fromBatch;
    if (axis === "time") x = times[idx];
    else if (axis === "records" && records.perBatch) x *= records.perBatch;
    else if (axis === "epochs" && records.perBatch && records.perEpoch) x *= records.perBatch / records.perEpoch;
    found.set(x, [...(found.get(x) ?? []), whyAgain(runs[idx - 1], run)]);
  });
  const marks = [...found].map(([x, texts]) => ({ x, text: texts.length > 3 ? `${texts.length} starts` : texts.join(", ") }));
  // With very many only the newest can be told apart.
  return marks.slice(-MOST_MARKS);
}
