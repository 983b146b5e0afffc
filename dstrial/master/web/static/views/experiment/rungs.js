// The rungs of an ASHA search: how many trials reached each, and what became of each trial there.

import { html } from "htm/preact/standalone";
import { get } from "../../api.js";
import { number } from "../../format.js";
import { ofExperiment, useLive } from "../../live.js";
import { Pending } from "../../parts/basics.js";
import { Table } from "../../parts/table.js";

const OUTCOMES = /** @type {Record<string, string>} */ ({ "went on": "went on", stopped: "stopped here", finished: "got to the end", failed: "ended by a failure" });

/** @param {{ id: number, experiment: any, trials: any[] }} props */
export function Rungs({ id, experiment, trials }) {
  const { data, error } = useLive((signal) => get(`/page/experiments/${id}/rungs`, {}, signal), ofExperiment(id), [id]);
  if (!data) return html`<${Pending} error=${error} />`;
  const states = new Map(trials.map((row) => [row.id, row]));
  const { brackets, metric, timeMetric, divisor } = data;
  const isSeveral = brackets.length > 1;
  const rows = brackets.flatMap((/** @type {any} */ bracket, /** @type {number} */ at) =>
    bracket.rungs.flatMap((/** @type {any} */ rung, /** @type {number} */ idx) => [
      ...rung.entries.map((/** @type {any} */ entry, /** @type {number} */ place) => ({ ...entry, id: `${at}.${idx}.${place}`, bracket: at + 1, rung: idx + 1, units: rung.units, place: place + 1, outcome: OUTCOMES[entry.outcome] })),
      ...rung.underWay.map((/** @type {number} */ trial) => ({ id: `${at}.${idx}.on.${trial}`, trial, value: null, bracket: at + 1, rung: idx + 1, units: rung.units, place: null, outcome: "on its way there" })),
    ]),
  );
  const maxTrials = Math.max(1, ...brackets.flatMap((/** @type {any} */ bracket) => bracket.rungs.map((/** @type {any} */ rung) => rung.total + rung.numUnderWay)));
  const isCut = brackets.some((/** @type {any} */ bracket) => bracket.rungs.some((/** @type {any} */ rung) => rung.entries.length < rung.total));
  if (!brackets.length) return html`<p class="muted">The searcher of this experiment has no rungs.</p>`;
  return html`
    <p class="muted">At each rung the best 1 in ${number(divisor)} by ${metric} go on; a rung is a number of ${timeMetric}. Trials that have been stopped do not come back.</p>
    ${brackets.map((/** @type {any} */ bracket, /** @type {number} */ at) => html`
      <h2>${isSeveral ? `Bracket ${at + 1}` : "Rungs"}</h2>
      <div class="sideways" tabindex="0"><table class="plain rungs">
        <thead><tr><th>Rung</th><th class="number">${timeMetric}</th><th class="number">got there</th><th class="number">went on</th><th class="number">stopped</th><th class="number">failed</th><th class="number">on their way</th><th>Trials</th></tr></thead>
        <tbody>${bracket.rungs.map((/** @type {any} */ rung, /** @type {number} */ idx) => html`<tr>
          <th scope="row">${idx + 1}${idx === bracket.rungs.length - 1 ? " (last)" : ""}</th>
          <td class="number">${rung.units}</td><td class="number">${rung.total}</td><td class="number">${idx === bracket.rungs.length - 1 ? `${rung.finished} finished` : rung.wentOn}</td>
          <td class="number">${rung.stopped}</td><td class="number">${rung.failed}</td><td class="number">${rung.numUnderWay}</td>
          <td><span class="bar" role="img" aria-label=${`${rung.wentOn + rung.finished} went on, ${rung.stopped} stopped, ${rung.failed} failed, ${rung.numUnderWay} on their way`}>
            ${[["on", rung.wentOn + rung.finished], ["stopped", rung.stopped], ["failed", rung.failed], ["way", rung.numUnderWay]].map(([kind, count]) => count > 0 && html`<i class=${kind} style=${{ width: `${(100 * Number(count)) / maxTrials}%` }}></i>`)}
          </span></td>
        </tr>`)}</tbody>
      </table></div>`)}
    <p class="muted legend"><span><i class="on"></i>went on or finished</span><span><i class="stopped"></i>stopped</span><span><i class="failed"></i>failed</span><span><i class="way"></i>on their way</span></p>
    <h2>Who got where</h2>
    ${isCut && html`<p class="muted">Of each rung the best 1000 are listed.</p>`}
    <${Table} name="rungs" label="Trials by rung" rows=${rows} columns=${/** @type {import("../../parts/table.js").Column[]} */ ([
      ...(isSeveral ? [{ id: "bracket", title: "Bracket", isNumber: true, value: (/** @type {any} */ row) => row.bracket }] : []),
      { id: "rung", title: "Rung", isNumber: true, value: (row) => row.rung },
      { id: "units", title: timeMetric, isNumber: true, value: (row) => row.units },
      { id: "place", title: "Place", isNumber: true, value: (row) => row.place },
      { id: "trial", title: "Trial", isNumber: true, value: (row) => row.trial, show: (row) => row.trial && html`<a href=${`/det/experiments/${id}/trials/${row.trial}`}>${row.trial}${row.trial === experiment.bestTrial ? " ★" : ""}</a>` },
      { id: "value", title: metric, isNumber: true, value: (row) => row.value, show: (row) => number(row.value) },
      { id: "outcome", title: "What became of it", value: (row) => row.outcome },
      { id: "state", title: "State now", isHidden: true, value: (row) => states.get(row.trial)?.state },
    ])} empty="No trial has got to a rung yet." />`;
}
