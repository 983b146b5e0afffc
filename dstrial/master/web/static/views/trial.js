// One trial: its facts, its actions, and its tabs.

import { html, useMemo, useRef } from "htm/preact/standalone";
import { isEnded } from "../actions.js";
import { get, send } from "../api.js";
import { duration, flat, number, plain, secondsBetween } from "../format.js";
import { ofTrial, useLive } from "../live.js";
import { attempt, Pending, Problem, Progress, State, Time, useStored } from "../parts/basics.js";
import { confirmAction } from "../parts/dialog.js";
import { Table } from "../parts/table.js";
import { Tabs } from "../router.js";
import { Checkpoints } from "./experiment/checkpoints.js";
import { Logs } from "./logs.js";
import { Instruments } from "./trial/instruments.js";
import { Metrics } from "./trial/metrics.js";
import { Runs } from "./trial/runs.js";

/** @typedef {{ id: string, title: string, show: any }} Tab `show` is a component with the props `trial`, `experiment`, `runs`, `metrics` and `baseline` */

/** @type {Tab[]} the first is shown if the address names none */
const TABS = [
  { id: "metrics", title: "Metrics", show: Metrics },
  { id: "instruments", title: "Instruments", show: Instruments },
  { id: "logs", title: "Logs", show: (/** @type {any} */ { trial }) => html`<${Logs} of=${{ trial: trial.id }} />` },
  { id: "hyperparameters", title: "Hyperparameters", show: Hyperparameters },
  { id: "checkpoints", title: "Checkpoints", show: (/** @type {any} */ { trial, experiment }) => html`<${Checkpoints} id=${trial.experiment} experiment=${experiment} trial=${trial.id} />` },
  { id: "runs", title: "Runs", show: Runs },
];

/** @param {{ trial: any }} props */
function Hyperparameters({ trial }) {
  const rows = useMemo(() => Object.entries(flat(trial.hparams)).map(([name, value]) => ({ id: name, value })), [trial.hparams]);
  const columns = useMemo(
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "name", title: "Hyperparameter", value: (row) => row.id },
      { id: "value", title: "Value", value: (row) => (typeof row.value === "object" ? plain(row.value) : row.value), show: (row) => html`<span title=${plain(row.value)}>${plain(row.value)}</span>` },
    ]),
    [],
  );
  return html`<${Table} name="hparams" label="Hyperparameters" columns=${columns} rows=${rows} empty="The trial has none." />`;
}

/** The beginning of an exit reason in Determined's format, before the failed rank's own message. */
const EXIT_PREFIX = /^container failed with non-zero exit code: \d+ \(exit code \d+\): /;

/** @param {string[]} words @returns {{ id: number, tab: string, base: string } | null} the trial that an address names, if any; `base` is the address without the tab */
export function trialAddress(words) {
  const [first, second, third, fourth, fifth] = words;
  if (first === "trials" && /^\d+$/.test(second)) return { id: Number(second), tab: third ?? "", base: `/det/trials/${second}` };
  if (first === "experiments" && /^\d+$/.test(second) && third === "trials" && /^\d+$/.test(fourth))
    return { id: Number(fourth), tab: fifth ?? "", base: `/det/experiments/${second}/trials/${fourth}` };
  return null;
}

/** @param {any} trial */
async function kill(trial) {
  if (!(await confirmAction(`Kill trial ${trial.id} at once, without a checkpoint?`, "Kill"))) return false;
  return attempt(() => send("POST", `/api/v1/trials/${trial.id}/kill`), `Trial ${trial.id} is being killed.`);
}

/** @param {{ words: string[] }} props */
export function Trial({ words }) {
  const { id, tab: wanted, base } = /** @type {{ id: number, tab: string, base: string }} */ (trialAddress(words));
  const own = useRef(0);
  const [baseline, setBaseline] = useStored("baseline", /** @type {number | null} */ (null));
  const { data, error, reload } = useLive(
    (signal) => get(`/page/trials/${id}`, {}, signal),
    (topic) => ofTrial(id)(topic) || topic === `experiment:${own.current}`,
    [id],
  );
  const tab = TABS.find((one) => one.id === wanted) ?? TABS[0];
  if (!data) return html`<main><h1 tabindex="-1">Trial ${id}</h1><${Pending} error=${error}><p><a href="/det/experiments">Go to the experiments</a></p><//></main>`;
  const { trial, experiment, runs, metrics } = data;
  own.current = trial.experiment;
  const failure = isEnded(trial) && trial.state !== "ERROR" ? undefined : runs.findLast((/** @type {any} */ run) => run.exitCode && run.reason);
  const isGone = /** @type {any} */ (error)?.status === 404;
  return html`<main>
    <p class="back"><a href="/det/experiments">Experiments</a> / <a href=${`/det/experiments/${trial.experiment}`}>${experiment.name}</a> /</p>
    <h1 tabindex="-1">Trial ${id} <span class="muted">of experiment ${trial.experiment}</span></h1>
    ${isGone ? html`<p class="problem" role="alert">This trial has been deleted; what is shown is what was known of it. <a href="/det/experiments">Go to the experiments</a></p>` : html`<${Problem} error=${error} />`}
    <div class="facts">
      <${State} state=${trial.state} />
      <${Progress} value=${trial.progress} state=${trial.state} />
      <span>${trial.batches.toLocaleString()} batches</span>
      ${trial.best !== null && html`<span>best ${experiment.metric} <b>${number(trial.best)}</b>${trial.bestBatch !== null && html` at batch ${trial.bestBatch}`}${experiment.bestTrial === id && trial.state !== "ERROR" && html` <b class="star">★ best of the experiment</b>`}</span>`}
      <span>${trial.restarts} ${trial.restarts === 1 ? "restart" : "restarts"}, ${trial.runs} ${trial.runs === 1 ? "run" : "runs"}</span>
      <span>${trial.slots} ${trial.slots === 1 ? "slot" : "slots"}</span>
      <span><${Time} at=${trial.start} />, ${duration(secondsBetween(trial.start, trial.end))}</span>
      ${trial.stoppedBySearcher && html`<span>stopped by the searcher</span>`}
      ${trial.earlyExit && html`<span>ended early: ${trial.earlyExit}</span>`}
      ${trial.warmStart && html`<span>started from checkpoint <code>${trial.warmStart.slice(0, 8)}</code></span>`}
    </div>
    ${failure && html`<p class=${trial.state === "ERROR" ? "problem failure" : "muted"} role=${trial.state === "ERROR" ? "alert" : undefined}>${trial.state === "ERROR" ? "" : "Last restart after: "}${failure.reason.replace(EXIT_PREFIX, "")} <a href=${`${base}/logs`}>Open the log</a></p>`}
    ${trial.stall && html`<p class="problem failure" role="alert">stalled: ${trial.stall}</p>`}
    ${trial.job && html`<p class="muted">${trial.job}</p>`}
    <div class="tools">
      ${!isEnded(trial) && !isGone && html`<button class="danger" onClick=${async () => (await kill(trial)) && reload()}>Kill</button>`}
      <button title="Draw this trial's curves in grey beside those of other trials" onClick=${() => setBaseline(baseline === id ? null : id)}>${baseline === id ? "No baseline" : "Pin as baseline"}</button>
      <a class="button" href=${`/det/compare?trials=${[...new Set([id, experiment.bestTrial ?? id])].join(",")}`}>Compare</a>
    </div>
    <${Tabs} tabs=${TABS.map((one) => [`${base}/${one.id}`, one.title])} now=${`${base}/${tab.id}`} label="Views of the trial" />
    <${tab.show} key=${tab.id} trial=${trial} experiment=${experiment} runs=${runs} metrics=${metrics} baseline=${baseline === id ? null : baseline} />
  </main>`;
}
