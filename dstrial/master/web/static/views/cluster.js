// The cluster: who uses what, what waits and why, and how busy it was.

import { html, useEffect, useMemo } from "htm/preact/standalone";
import { get } from "../api.js";
import { useLive } from "../live.js";
import { number } from "../format.js";
import { Problem } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { useParam } from "../router.js";
import { Nodes } from "./cluster/nodes.js";
import { Queue } from "./cluster/queue.js";

const TOPIC = /^(scheduler$|experiment:|command:|job:)/;
const BACKENDS = /** @type {Record<string, string>} */ ({ local: "this machine", hosts: "hosts over ssh", slurm: "jobs of Slurm", ray: "placement groups of Ray" });

export function Cluster() {
  return html`<main>
    <h1 tabindex="-1">Cluster</h1>
    <${Machines} />
  </main>`;
}

function Machines() {
  const { data, error, reload } = useLive((signal) => get("/page/cluster", {}, signal), (topic) => TOPIC.test(topic), []);
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`;
  const running = Object.values(data.holders).length;
  return html`<${Problem} error=${error} />
    <div class="facts">
      <span>pool <b>${data.pool}</b>, ${BACKENDS[data.backend] ?? data.backend}</span>
      <span><b>${data.free}</b> of ${data.usable} ${data.usable === 1 ? "slot" : "slots"} free</span>
      <span>${running} ${running === 1 ? "task runs" : "tasks run"}</span>
      <span>${data.queue.length} in the queue</span>
    </div>
    ${data.engine && html`<${Engine} engine=${data.engine} />`}
    <${Nodes} nodes=${data.nodes} holders=${data.holders} reload=${reload} />
    <${Queue} queue=${data.queue} reload=${reload} />
    <${Usage} />
    ${data.warm.length > 0 && html`<h2>Warm processes</h2>
      <ul>${data.warm.map((/** @type {any} */ one) => html`<li>process ${one.pid}: ${one.state === "importing" ? "imports what trials import" : "trials start as its forks"};
        ${one.forks} so far</li>`)}</ul>`}`;
}

/** @param {{ engine: any }} props what lends nodes */
function Engine({ engine }) {
  return html`<h2>${engine.name}</h2>
    ${engine.away && html`<p class="problem" role="alert">${engine.away}</p>`}
    ${engine.jobs.length ? html`<ul>${engine.jobs.map((/** @type {string} */ job) => html`<li>${job}</li>`)}</ul>` : html`<p class="muted">No jobs.</p>`}`;
}

/** Hours, and what they are counted in. @type {(hours: number) => [string, number]} */
const unitOf = (hours) => (hours <= 1 ? ["minutes", 60_000] : hours <= 24 ? ["hours", 3_600_000] : ["days", 86_400_000]);
const PERIODS = /** @type {[string, string][]} */ ([["1", "hour"], ["6", "6 hours"], ["24", "day"], ["168", "week"], ["744", "month"]]);
const AGAIN_MS = 60_000;

function Usage() {
  const [hours, setHours] = useParam("hours", "24");
  const [unit, size] = unitOf(Number(hours));
  const { data, error, reload } = useLive((signal) => get("/page/cluster/usage", { hours }, signal), (topic) => topic === "scheduler", [hours]);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || reload(), AGAIN_MS); // Time goes on, also where nothing happens.
    return () => clearInterval(timer);
  }, []);
  const curves = useMemo(() => {
    if (!data) return [];
    const { times, used, slots, now } = data;
    const xs = times.map((/** @type {number} */ ms) => (ms - now) / size);
    return [
      { id: "used", label: "in use", xs, ys: used },
      { id: "slots", label: "slots now", xs: [xs[0], 0], ys: [slots, slots] },
    ];
  }, [data, size]);
  const mean = data ? data.used.reduce((/** @type {number} */ sum, /** @type {number} */ one) => sum + one, 0) / data.used.length : 0;
  return html`<h2>Use</h2>
    <${Problem} error=${error} />
    <div class="tools"><label>Over the last <select value=${hours} onChange=${(/** @type {any} */ event) => setHours(event.target.value)}>
      ${PERIODS.map(([value, text]) => html`<option value=${value}>${text}</option>`)}
    </select></label>
    ${data && html`<span class="muted">${mean.toFixed(2)} of ${data.slots} slots in use on average${data.slots ? `, ${Math.round((100 * mean) / data.slots)} %` : ""}</span>`}</div>
    <${Chart} title="Slots in use" xLabel=${`${unit} ago`} curves=${curves} showX=${(/** @type {number} */ x) => number(-x, 3)} isFromZero height=${220} />`;
}
