// Searches of dsat by their reports: a small one while a search runs, the whole one once it has ended.

import { html, useMemo } from "htm/preact/standalone";
import { get } from "../api.js";
import { bytes, duration, number, secondsBetween } from "../format.js";
import { useLive } from "../live.js";
import { Problem, State, Time } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Table } from "../parts/table.js";
import { navigate } from "../router.js";

const concerns = (/** @type {string} */ topic) => /^(experiment|metrics):/.test(topic);

/** @param {{ words: string[] }} props */
export function Searches({ words }) {
  return words[1] ? html`<${Search} id=${words[1]} />` : html`<${List} />`;
}

function List() {
  const { data, error } = useLive((signal) => get("/page/searches", {}, signal), (topic) => topic.startsWith("experiment:"), []);
  const columns = useMemo(
    () => [
      { id: "name", title: "Name", value: (/** @type {any} */ row) => row.name },
      { id: "state", title: "State", value: (/** @type {any} */ row) => row.state, show: (/** @type {any} */ row) => html`<${State} state=${row.state} />` },
      { id: "method", title: "Method", value: (/** @type {any} */ row) => row.method },
      { id: "metric", title: "Searched for", value: (/** @type {any} */ row) => row.metric },
      { id: "experiments", title: "Experiments", isNumber: true, value: (/** @type {any} */ row) => row.experiments.length },
      { id: "report", title: "Report", value: (/** @type {any} */ row) => (row.hasReport ? "yes" : "") },
      { id: "user", title: "User", value: (/** @type {any} */ row) => row.user },
      { id: "start", title: "Started", value: (/** @type {any} */ row) => row.start, show: (/** @type {any} */ row) => html`<${Time} at=${row.start} />` },
      { id: "took", title: "Took", isNumber: true, value: (/** @type {any} */ row) => secondsBetween(row.start, row.end), show: (/** @type {any} */ row) => duration(secondsBetween(row.start, row.end)) },
      { id: "id", title: "ID", value: (/** @type {any} */ row) => row.id },
    ],
    [],
  );
  return html`<main>
    <h1 tabindex="-1">Tuning <span class="muted">searches of dsat</span></h1>
    <${Problem} error=${error} />
    ${data === null
      ? !error && html`<p class="loading">Loading …</p>`
      : html`<${Table} name="searches" label="Searches" columns=${columns} rows=${data.searches} sort="-start" href=${(/** @type {any} */ row) => `/det/searches/${row.id}`}
          empty=${html`No search of dsat ran on this master. Start one: <code>dstrial dsat exp.yaml .</code>`} />`}
  </main>`;
}

/** @param {any} row @returns {string} */
const link = (row) => (row.experiment ? `/det/experiments/${row.experiment}` : "");

/** Points as curves of one each, and a line. @param {any[]} rows @param {(row: any) => [number, number]} place @param {number | null} best */
const points = (rows, place, best) =>
  rows.map((row) => {
    const [x, y] = place(row);
    return { id: row.trial_id, label: `${row.trial_id > 0 ? `${row.trial_id}: ` : ""}${row.description}`, xs: [x], ys: [y], isBest: row.trial_id === best, href: link(row) };
  });

/** @param {{ id: string }} props */
function Search({ id }) {
  const { data, error } = useLive((signal) => get(`/page/searches/${encodeURIComponent(id)}`, {}, signal), concerns, [id]);
  const report = data?.report ?? null;
  const search = data?.search;
  const metric = report?.metric ?? search?.metric ?? "";
  const trials = useMemo(() => (data?.trials ?? []).map((/** @type {any} */ row) => ({ ...row, id: row.trial_id })), [data]);
  const isSmaller = report ? report.smaller_is_better : search?.smallerIsBetter;
  const best = useMemo(() => {
    if (report?.is_finished) return report.best;
    const known = trials.filter((/** @type {any} */ row) => typeof row.value === "number");
    known.sort((/** @type {any} */ a, /** @type {any} */ b) => (isSmaller ? a.value - b.value : b.value - a.value));
    return known[0]?.trial_id ?? null;
  }, [trials, report, isSmaller]);
  const pareto = useMemo(() => {
    const known = trials.filter((/** @type {any} */ row) => row.memory_bytes && row.throughput);
    const front = (report?.pareto ?? []).map((/** @type {number} */ one) => known.find((/** @type {any} */ row) => row.trial_id === one)).filter(Boolean);
    const place = (/** @type {any} */ row) => /** @type {[number, number]} */ ([row.memory_bytes / 2 ** 30, row.throughput]);
    return [...points(known, place, best), { id: "front", label: "beaten by none", isGuide: true, xs: front.map((/** @type {any} */ row) => place(row)[0]), ys: front.map((/** @type {any} */ row) => place(row)[1]) }];
  }, [trials, best, report]);
  const front = useMemo(() => new Set(report?.pareto ?? []), [report]);
  const columns = useMemo(
    () => [
      { id: "trial", title: "Trial", isNumber: true, value: (/** @type {any} */ row) => (row.trial_id > 0 ? row.trial_id : ""), show: (/** @type {any} */ row) => (row.trial_id > 0 ? `${row.trial_id}${row.trial_id === best ? " ★" : ""}` : "") },
      { id: "description", title: "Configuration", value: (/** @type {any} */ row) => row.description, show: (/** @type {any} */ row) => html`<span title=${row.description}>${link(row) ? html`<a href=${link(row)}>${row.description}</a>` : row.description}</span>` },
      { id: "state", title: "State", value: (/** @type {any} */ row) => row.state, show: (/** @type {any} */ row) => html`<span title=${row.failure?.message ?? row.why}>${row.state}</span>` },
      { id: "value", title: metric, isNumber: true, hint: report?.unit, value: (/** @type {any} */ row) => row.value, show: (/** @type {any} */ row) => number(row.value) },
      { id: "throughput", title: "Records/s", isNumber: true, value: (/** @type {any} */ row) => row.throughput, show: (/** @type {any} */ row) => number(row.throughput) },
      { id: "step", title: "Step ms", isNumber: true, value: (/** @type {any} */ row) => row.step_s, show: (/** @type {any} */ row) => (row.step_s ? number(row.step_s * 1000, 4) : "") },
      { id: "predicted", title: "Predicted ms", isNumber: true, isHidden: true, value: (/** @type {any} */ row) => row.predicted?.step_s, show: (/** @type {any} */ row) => (row.predicted?.step_s ? number(row.predicted.step_s * 1000, 4) : "") },
      { id: "memory", title: "Memory", isNumber: true, hint: "of a device, at most", value: (/** @type {any} */ row) => row.memory_bytes, show: (/** @type {any} */ row) => (row.memory_bytes ? bytes(row.memory_bytes) : "") },
      { id: "front", title: "Pareto", value: (/** @type {any} */ row) => (front.has(row.trial_id) ? "yes" : "") },
      { id: "seconds", title: "Took", isNumber: true, isHidden: true, value: (/** @type {any} */ row) => row.seconds, show: (/** @type {any} */ row) => duration(row.seconds) },
      { id: "why", title: "Why tried", isHidden: true, value: (/** @type {any} */ row) => row.why },
    ],
    [metric, best, front, report],
  );
  if (!data) return html`<main><h1 tabindex="-1">Search ${id}</h1>${error ? html`<${Problem} error=${error} /><p><a href="/det/searches">All searches</a></p>` : html`<p class="loading">Loading …</p>`}</main>`;
  const measured = trials.filter((/** @type {any} */ row) => row.state === "measured").length;
  return html`<main>
    <p class="back"><a href="/det/searches">Tuning</a> /</p>
    <h1 tabindex="-1">${report?.name ?? search.name} <span class="muted">search ${id}</span></h1>
    <${Problem} error=${error} />
    <div class="facts">
      <${State} state=${search.state} />
      <span>${report?.method ?? search.method}, for ${metric}</span>
      <span>${measured} of ${trials.length} ${trials.length === 1 ? "configuration" : "configurations"} measured</span>
      ${report && report.best !== null && report.best === report.own && html`<span>its own configuration is the best${report.is_finished ? "" : " so far"}</span>`}
      ${report && typeof report.gain === "number" && report.best !== report.own && html`<span><b>${(100 * report.gain).toFixed(1)} %</b> better than its own configuration${report.is_gain_certain ? "" : ", which may be chance"}</span>`}
      <span>by ${search.user}, <${Time} at=${search.start} />, ${duration(secondsBetween(search.start, search.end))}</span>
      ${search.full && html`<span>trained as <a href=${`/det/experiments/${search.full}`}>experiment ${search.full}</a></span>`}
    </div>
    ${report?.reason && html`<p>${report.reason}</p>`}
    ${report?.notes?.length > 0 && html`<ul>${report.notes.map((/** @type {string} */ note) => html`<li>${note}</li>`)}</ul>`}
    ${!report && html`<p class="muted">Nothing has been told of this search yet: dsat writes its report into the notes of one of its experiments, where a person has not written some.</p>`}
    ${report && !report.is_finished && !report.reason && search.state !== "RUNNING" && html`<p class="muted">Nothing of this search runs any more, and it has not said how it ended: this is what it had told last. The same command goes on with it.</p>`}
    <${Chart} title="Records per second against memory" xLabel="GiB of a device" curves=${pareto} isScatter onOpen=${navigate} height=${300} />
    <h2>Configurations</h2>
    <${Table} name="configurations" label="Configurations" columns=${columns} rows=${trials} sort=${isSmaller ? "value" : "-value"} rowClass=${(/** @type {any} */ row) => (row.trial_id === best ? "best" : "")} empty="Nothing has been tried yet." />
  </main>`;
}
