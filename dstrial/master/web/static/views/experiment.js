// One experiment: its facts, its actions, and its tabs.

import { html, useMemo } from "htm/preact/standalone";
import { ACTIONS, actOnExperiments } from "../actions.js";
import { get } from "../api.js";
import { duration, number, secondsBetween } from "../format.js";
import { ofExperiment, useLive } from "../live.js";
import { Pending, Problem, Progress, State, Time } from "../parts/basics.js";
import { Tabs } from "../router.js";
import { Checkpoints } from "./experiment/checkpoints.js";
import { Code } from "./experiment/code.js";
import { Config } from "./experiment/config.js";
import { HeadActions } from "./experiment/head_actions.js";
import { Hyperparameters } from "./experiment/hyperparameters.js";
import { Overview } from "./experiment/overview.js";
import { Rungs } from "./experiment/rungs.js";

/**
 * @typedef {object} Tab
 * @property {string} id in the address
 * @property {string} title
 * @property {any} show a component with the props `id`, `experiment`, `metrics`, `trials` and `reload`
 * @property {(experiment: any) => boolean} [fits] whether an experiment has this tab
 */

/** @type {Tab[]} the first is shown if the address names none */
const TABS = [
  { id: "overview", title: "Overview", show: Overview },
  { id: "hyperparameters", title: "Hyperparameters", show: Hyperparameters },
  { id: "rungs", title: "Rungs", show: Rungs, fits: (experiment) => !experiment.unmanaged && ["adaptive_asha", "async_halving"].includes(experiment.searcher) },
  { id: "checkpoints", title: "Checkpoints", show: Checkpoints },
  { id: "config", title: "Config", show: Config },
  { id: "code", title: "Code", show: Code },
];

const MAX_CHANGED = 200; // changed trials that are loaded by their ids; if there are more, all are loaded

/** Return a function that loads an experiment with its trials; after a change, only changed trials. @param {number} id @returns {(signal: AbortSignal, change: Set<string> | null, before: any) => Promise<any>} */
const loader = (id) => async (signal, change, before) => {
  const ids = change && before ? [...change].filter((topic) => topic.startsWith("metrics:")).map((topic) => Number(topic.split(":")[1])) : [];
  const isPartial = change && before && ids.length <= MAX_CHANGED && ![...change].some((topic) => topic.startsWith("experiment:"));
  const [whole, { trials }] = await Promise.all([
    get(`/page/experiments/${id}`, {}, signal),
    isPartial ? (ids.length ? get(`/page/experiments/${id}/trials`, { ids }, signal) : { trials: [] }) : get(`/page/experiments/${id}/trials`, {}, signal),
  ]);
  if (!isPartial) return { ...whole, trials };
  const fresh = new Map(trials.map((/** @type {any} */ row) => [row.id, row]));
  return { ...whole, trials: before.trials.map((/** @type {any} */ row) => fresh.get(row.id) ?? row) };
};

/** @param {{ words: string[] }} props */
export function Experiment({ words }) {
  const id = Number(words[1]);
  const { data, error, reload } = useLive(loader(id), ofExperiment(id), [id]);
  const tab = TABS.find((one) => one.id === words[2]) ?? TABS[0];
  const base = `/det/experiments/${id}`;
  const { searcher, unmanaged } = data?.experiment ?? {};
  const tabs = useMemo(() => /** @type {[string, string][]} */ (TABS.filter((one) => one.fits?.({ searcher, unmanaged }) ?? true).map((one) => [`${base}/${one.id}`, one.title])), [id, searcher, unmanaged]);
  if (!data) return html`<main><h1 tabindex="-1">Experiment ${id}</h1><${Pending} error=${error}><p><a href="/det/experiments">Go to the experiments</a></p><//></main>`;
  const { experiment, metrics, trials } = data;
  return html`<main>
    <h1 tabindex="-1">${experiment.name} <span class="muted">experiment ${id}</span></h1>
    <${Problem} error=${error} />
    <div class="facts">
      <${State} state=${experiment.state} />
      <${Progress} value=${experiment.progress} state=${experiment.state} />
      <span>${trials.length} ${trials.length === 1 ? "trial" : "trials"}, ${experiment.searcher}</span>
      ${experiment.best !== null && experiment.state !== "ERROR" && html`<span>best ${experiment.metric} <b>${number(experiment.best)}</b> by <a href=${`${base}/trials/${experiment.bestTrial}`}>trial ${experiment.bestTrial}</a></span>`}
      <span>by ${experiment.user}, <${Time} at=${experiment.start} />, ${duration(secondsBetween(experiment.start, experiment.end))}</span>
      ${experiment.parent && html`<span>forked from <a href=${`/det/experiments/${experiment.parent}`}>${experiment.parent}</a></span>`}
      ${experiment.labels.map((/** @type {string} */ label) => html`<span class="label">${label}</span>`)}
    </div>
    ${experiment.description && html`<p>${experiment.description}</p>`}
    ${experiment.notes && html`<pre tabindex="0">${experiment.notes}</pre>`}
    ${experiment.reason && html`<p class="problem">${experiment.reason}</p>`}
    <div class="tools">
      <${HeadActions} id=${id} experiment=${experiment} reload=${reload} />
      ${ACTIONS.map((action) => action.can(experiment) && html`<button class=${action.question ? "danger" : ""} onClick=${async () => (await actOnExperiments(action, [experiment])) && reload()}>${action.name}</button>`)}
    </div>
    <${Tabs} tabs=${tabs} now=${`${base}/${tab.id}`} label="Views of the experiment" />
    <${tab.show} id=${id} experiment=${experiment} metrics=${metrics} trials=${trials} reload=${reload} />
  </main>`;
}
