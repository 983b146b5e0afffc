// The cluster: who uses what, what waits and why.

import { html } from "htm/preact/standalone";
import { get } from "../api.js";
import { useLive } from "../live.js";
import { Problem } from "../parts/basics.js";
import { Nodes } from "./cluster/nodes.js";
import { Queue } from "./cluster/queue.js";

const TOPIC = /^(scheduler$|experiment:|command:|job:)/;
const BACKENDS = /** @type {Record<string, string>} */ ({ local: "this machine", hosts: "hosts over ssh", slurm: "jobs of Slurm", ray: "placement groups of Ray" });

export function Cluster() {
  const { data, error, reload } = useLive((signal) => get("/page/cluster", {}, signal), (topic) => TOPIC.test(topic), []);
  if (!data) return html`<main><h1 tabindex="-1">Cluster</h1>${error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`}</main>`;
  const running = Object.values(data.holders).length;
  return html`<main><h1 tabindex="-1">Cluster</h1><${Problem} error=${error} />
    <div class="facts">
      <span>pool <b>${data.pool}</b>, ${BACKENDS[data.backend] ?? data.backend}</span>
      <span><b>${data.free}</b> of ${data.usable} ${data.usable === 1 ? "slot" : "slots"} free</span>
      <span>${running} ${running === 1 ? "task runs" : "tasks run"}</span>
      <span>${data.queue.length} in the queue</span>
    </div>
    ${data.engine && html`<${Engine} engine=${data.engine} />`}
    <${Nodes} nodes=${data.nodes} holders=${data.holders} reload=${reload} />
    <${Queue} queue=${data.queue} reload=${reload} /></main>`;
}

/** @param {{ engine: any }} props what lends nodes */
function Engine({ engine }) {
  return html`<h2>${engine.name}</h2>
    ${engine.away && html`<p class="problem" role="alert">${engine.away}</p>`}
    ${engine.jobs.length ? html`<ul>${engine.jobs.map((/** @type {string} */ job) => html`<li>${job}</li>`)}</ul>` : html`<p class="muted">No jobs.</p>`}`;
}
