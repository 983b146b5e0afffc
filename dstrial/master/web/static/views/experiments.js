// The list of experiments, with a filter, comparison, and actions on several.

import { html, useMemo, useState } from "htm/preact/standalone";
import { ACTIONS, actOnExperiments, isEnded } from "../actions.js";
import { get } from "../api.js";
import { bytes, duration, number, plain, secondsBetween, shortNames } from "../format.js";
import { useLive } from "../live.js";
import { Check, Problem, Progress, SearchField, Select, State, Time } from "../parts/basics.js";
import { filterRows, valueByName } from "../parts/filter.js";
import { Table, timeColumn, tookColumn } from "../parts/table.js";
import { navigate, useFlag, useParam } from "../router.js";

const TOPIC = /^(experiment|metrics):/;
const STATES = ["QUEUED", "STARTING", "RUNNING", "PAUSED", "COMPLETED", "CANCELED", "ERROR"];
const MAX_CHANGED = 50; // changed experiments that are loaded by their ids; if there are more, all are loaded

/** @param {string} topic @returns {number} the id of its experiment */
const experimentOf = (topic) => Number(topic.split(":").pop());

/**
 * Load all experiments or, after a change, only those that have changed.
 *
 * @param {AbortSignal} signal @param {Set<string> | null} change @param {any[] | null} before
 */
async function load(signal, change, before) {
  const ids = change && before ? [...new Set([...change].map(experimentOf))] : [];
  if (!change || !before || ids.length > MAX_CHANGED) return (await get("/page/experiments", {}, signal)).experiments;
  if (!ids.length) return before;
  const { experiments } = await get("/page/experiments", { ids }, signal);
  const fresh = new Map(experiments.map((/** @type {any} */ row) => [row.id, row]));
  const known = new Set(before.map((row) => row.id));
  const added = experiments.filter((/** @type {any} */ row) => !known.has(row.id));
  const kept = before.filter((row) => fresh.has(row.id) || !ids.includes(row.id)).map((row) => fresh.get(row.id) ?? row);
  return [...added, ...kept];
}

/** @param {any} row @returns {number} estimated seconds left; NaN if unknown */
function timeLeft(row) {
  if (isEnded(row) || row.state === "PAUSED" || !(row.progress > 0.01)) return NaN;
  return (secondsBetween(row.start, null) * (1 - row.progress)) / row.progress || NaN;
}

/** @param {any} values the config's hyperparameters @param {string} [before] prefix of the names @returns {Record<string, unknown>} dotted name -> value, or the searched range as text */
function hyperparameters(values, before = "") {
  return Object.fromEntries(Object.entries(values ?? {}).flatMap(([key, value]) => {
    const name = before + key;
    const { type, val, vals, minval, maxval, base = 10 } = value ?? {};
    if (type === "const") return [[name, val]];
    if (type === "categorical") return [[name, vals.map(plain).join(" | ")]];
    if (type === "log") return [[name, `${number(base ** minval)} … ${number(base ** maxval)}`]];
    if (type === "int" || type === "double") return [[name, `${number(minval)} … ${number(maxval)}`]];
    return value && typeof value === "object" && !Array.isArray(value) ? Object.entries(hyperparameters(value, `${name}.`)) : [[name, value]];
  }));
}

/** @param {string} reason why an experiment has ended @returns {string} without the part that all failures share */
const brief = (reason) => reason.replace(/^trial \d+: max_restarts is \d+: /, "");

/** One line: how many run, wait and have failed, the newest failure and result. @param {{ rows: any[] }} props experiments, the newest first */
function Summary({ rows }) {
  const failed = rows.filter((row) => row.state === "ERROR");
  const result = rows.find((row) => row.state === "COMPLETED" && row.best !== null);
  const waiting = rows.filter((row) => row.state === "QUEUED").length;
  const running = rows.filter((row) => !isEnded(row) && row.state !== "PAUSED").length - waiting;
  const link = (/** @type {any} */ row) => html`<a href=${`/det/experiments/${row.id}`}>${row.name}</a>`;
  return html`<p class="summary">${running} running, ${waiting} queued, ${failed.length} failed${failed.length > 0 && html` (newest: ${link(failed[0])}, <${Time} at=${failed[0].end} isAgo />)`}${
    result && html`; newest result: ${link(result)}, ${result.metric} <b>${number(result.best)}</b>, <${Time} at=${result.end} isAgo />`}</p>`;
}

export function Experiments() {
  const { data, error, reload } = useLive(load, (topic) => TOPIC.test(topic), []);
  const [text, setText] = useParam("filter");
  const [state, setState] = useParam("state");
  const [archived, setArchived] = useFlag("archived");
  const [selected, setSelected] = useState(/** @type {Set<number>} */ (new Set()));
  const all = useMemo(() => (data ?? []).map((row) => ({ ...row, hp: hyperparameters(row.hyperparameters) })), [data]);
  const names = useMemo(() => [...new Set(all.flatMap((row) => Object.keys(row.hp)))].sort().slice(0, 200), [all]);
  const rows = useMemo(() => {
    const kept = all.filter((row) => (archived || !row.archived) && (!state || row.state === state));
    return filterRows(
      text,
      kept,
      (row, name) => {
        const facts = { id: row.id, state: row.state, label: row.labels, user: row.user, project: row.project, workspace: row.workspace, searcher: row.searcher, name: row.name, metric: row.metric, best: row.best, trials: row.trials, slots: row.slots, progress: row.progress };
        return !(name in facts) && name === row.metric.toLowerCase() ? row.best : valueByName(facts, row.hp, name);
      },
      (row) => [row.id, row.name, row.description, row.user, row.project, ...row.labels].join(" "),
    );
  }, [all, text, state, archived]);
  const short = useMemo(() => shortNames(names), [names]);
  const isAlone = new Set(all.map((row) => row.user)).size < 2;
  const columns = useMemo(
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "id", title: "ID", isNumber: true, value: (row) => row.id },
      { id: "name", title: "Name", value: (row) => row.name, show: (row) => html`<a href=${`/det/experiments/${row.id}`}>${row.name}</a>${row.labels.map((/** @type {string} */ label) => html` <span class="label">${label}</span>`)}` },
      { id: "state", title: "State", value: (row) => row.state, show: (row) => html`<span class="why" title=${row.reason}><${State} state=${row.state} />${row.reason && html` <span class="muted">${brief(row.reason)}</span>`}</span>` },
      { id: "progress", title: "Progress", value: (row) => row.progress, show: (row) => html`<${Progress} value=${row.progress} state=${row.state} />` },
      { id: "left", title: "Left", isNumber: true, hint: "time left, if it goes on as it went", value: timeLeft, show: (row) => duration(timeLeft(row)) },
      { id: "best", title: "Best", isNumber: true, value: (row) => row.best, show: (row) => (row.best === null || row.state === "ERROR" ? "" : html`<span class="muted">${row.metric}</span> ${number(row.best)}`) },
      { id: "trials", title: "Trials", isNumber: true, value: (row) => row.trials },
      { id: "searcher", title: "Searcher", value: (row) => row.searcher },
      { id: "user", title: "User", isHidden: isAlone, value: (row) => row.user },
      { id: "start", title: "Started", value: (row) => row.start, show: (row) => html`<${Time} at=${row.start} isAgo />` },
      tookColumn(),
      { id: "metric", title: "Metric", isHidden: true, value: (row) => row.metric },
      { id: "project", title: "Project", isHidden: true, value: (row) => `${row.workspace} / ${row.project}` },
      { id: "slots", title: "Slots", isHidden: true, isNumber: true, hint: "per trial", value: (row) => row.slots },
      { id: "size", title: "Checkpoints", isHidden: true, isNumber: true, value: (row) => row.checkpointBytes, show: (row) => bytes(row.checkpointBytes) },
      { id: "parent", title: "Forked from", isHidden: true, isNumber: true, value: (row) => row.parent },
      { id: "description", title: "Description", isHidden: true, value: (row) => row.description },
      timeColumn("end", "Ended", "end", { isHidden: true }),
      ...names.map((name) => ({ id: `hp.${name}`, title: short.get(name) ?? name, hint: name, isHidden: true, value: (/** @type {any} */ row) => row.hp[name], show: (/** @type {any} */ row) => plain(row.hp[name]) })),
    ]),
    [names, isAlone],
  );
  const chosen = all.filter((row) => selected.has(row.id));
  const counts = useMemo(() => STATES.map((one) => [one, all.filter((row) => row.state === one && (archived || !row.archived)).length]), [all, archived]);

  return html`<main>
    <h1 tabindex="-1">Experiments</h1>
    <${Problem} error=${error} />
    ${all.length > 0 && html`<${Summary} rows=${all.filter((row) => !row.archived)} />`}
    <div class="filters">
      <${SearchField} text=${text} set=${setText} label="Filter" placeholder="Filter: words, label:long, user:ann, lr<0.01, loss<=0.5" title="Words are looked for in name, description, labels, user and project. name:text contains, name=value is, <, >, <=, >=, != compare; a minus before any of these negates." />
      <${Select} label="State" value=${state} set=${setState}>
        <option value="">All states</option>
        ${counts.map(([one, count]) => html`<option value=${one}>${String(one).toLowerCase()} (${count})</option>`)}
      <//>
      <${Check} checked=${archived} set=${setArchived}>archived<//>
    </div>
    ${data === null && !error
      ? html`<p class="loading">Loading …</p>`
      : html`<${Table} name="experiments" label="Experiments" columns=${columns} rows=${rows} sort="-id" selected=${selected} onSelect=${setSelected}
          href=${(/** @type {any} */ row) => `/det/experiments/${row.id}`}
          empty=${all.length ? "No experiment fits the filter." : html`No experiments yet. Submit one: <code>det experiment create exp.yaml .</code>`}
          tools=${chosen.length > 0 && html`<span>${chosen.length} selected:</span>
            ${ACTIONS.map((action) => html`<button class=${action.question ? "danger" : ""} disabled=${!chosen.some(action.can)}
              onClick=${async () => (await actOnExperiments(action, chosen)) && reload()}>${action.name}</button>`)}
            <button disabled=${chosen.length < 2} onClick=${() => navigate(`/det/compare?experiments=${chosen.map((row) => row.id).join(",")}`)}>Compare</button>`} />`}
  </main>`;
}

