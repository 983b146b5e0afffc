// Searches by dsat, shown by their reports: a short one while a search runs, the full one after its end.

import { html, useMemo } from "htm/preact/standalone";
import { get } from "../api.js";
import { bytes, duration, number, secondsBetween } from "../format.js";
import { useLive } from "../live.js";
import { Pending, Problem, State, Time } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Table, timeColumn, tookColumn } from "../parts/table.js";
import { navigate } from "../router.js";

const concerns = (/** @type {string} */ topic) => /^(experiment|metrics):/.test(topic);

/** @param {{ words: string[] }} props */
export function Searches({ words }) {
  return words[1] ? html`<${Search} id=${words[1]} />` : html`<${List} />`;
}

function List() {
  const { data, error } = useLive((signal) => get("/page/searches", {}, signal), (topic) => topic.startsWith("experiment:"), []);
  const columns = useMemo(
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "name", title: "Name", value: (row) => row.name },
      { id: "state", title: "State", value: (row) => row.state, show: (row) => html`<${State} state=${row.state} />` },
      { id: "method", title: "Method", value: (row) => row.method },
      { id: "metric", title: "Searched for", value: (row) => row.metric },
      { id: "experiments", title: "Experiments", isNumber: true, value: (row) => row.experiments.length },
      { id: "report", title: "Report", value: (row) => (row.hasReport ? "yes" : "") },
      { id: "user", title: "User", value: (row) => row.user },
      timeColumn("start", "Started", "start"),
      tookColumn(),
      { id: "id", title: "ID", value: (row) => row.id },
    ]),
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

/** @param {any} row @returns {string} address of its experiment; empty if it has none */
const link = (row) => (row.experiment ? `/det/experiments/${row.experiment}` : "");

/** Return a curve of one point for each row. @param {any[]} rows @param {(row: any) => [number, number]} place returns x and y @param {number | null} best id of the best row */
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
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "trial", title: "Trial", isNumber: true, value: (row) => (row.trial_id > 0 ? row.trial_id : ""), show: (row) => (row.trial_id > 0 ? `${row.trial_id}${row.trial_id === best ? " ★" : ""}` : "") },
      { id: "description", title: "Configuration", value: (row) => row.description, show: (row) => html`<span title=${row.description}>${link(row) ? html`<a href=${link(row)}>${row.description}</a>` : row.description}</span>` },
      { id: "state", title: "State", value: (row) => row.state, show: (row) => html`<span title=${row.failure?.message ?? row.why}>${row.state}</span>` },
      { id: "value", title: metric, isNumber: true, hint: report?.unit, value: (row) => row.value, show: (row) => number(row.value) },
      { id: "throughput", title: "Records/s", isNumber: true, value: (row) => row.throughput, show: (row) => number(row.throughput) },
      { id: "step", title: "Step ms", isNumber: true, value: (row) => row.step_s, show: (row) => (row.step_s ? number(row.step_s * 1000, 4) : "") },
      { id: "predicted", title: "Predicted ms", isNumber: true, isHidden: true, value: (row) => row.predicted?.step_s, show: (row) => (row.predicted?.step_s ? number(row.predicted.step_s * 1000, 4) : "") },
      { id: "memory", title: "Memory", isNumber: true, hint: "of a device, at most", value: (row) => row.memory_bytes, show: (row) => (row.memory_bytes ? bytes(row.memory_bytes) : "") },
      { id: "front", title: "Pareto", value: (row) => (front.has(row.trial_id) ? "yes" : "") },
      { id: "seconds", title: "Took", isNumber: true, isHidden: true, value: (row) => row.seconds, show: (row) => duration(row.seconds) },
      { id: "why", title: "Why tried", isHidden: true, value: (row) => row.why },
    ]),
    [metric, best, front, report],
  );
  if (!data) return html`<main><h1 tabindex="-1">Search ${id}</h1><${Pending} error=${error}><p><a href="/det/searches">All searches</a></p><//></main>`;
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
