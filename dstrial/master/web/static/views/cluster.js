// The cluster: who uses what, what waits and why, and how busy it was.

import { html } from "htm/preact/standalone";
import { get } from "../api.js";
import { useLive } from "../live.js";
import { Problem } from "../parts/basics.js";
import { Tabs } from "../router.js";
import { Nodes } from "./cluster/nodes.js";
import { Queue } from "./cluster/queue.js";
import { Usage } from "./cluster/usage.js";
import { Webhooks } from "./cluster/webhooks.js";

const TOPIC = /^(scheduler$|experiment:|command:|job:)/;
export const CLUSTER_TABS = /** @type {[string, string][]} */ ([["/det/clusters", "Nodes and queue"], ["/det/webhooks", "Webhooks"]]);
const BACKENDS = /** @type {Record<string, string>} */ ({ local: "this machine", hosts: "hosts over ssh", slurm: "jobs of Slurm", ray: "placement groups of Ray" });

/** @param {{ words: string[] }} props */
export function Cluster({ words }) {
  const isWebhooks = words[0] === "webhooks";
  return html`<main>
    <h1 tabindex="-1">Cluster</h1>
    <${Tabs} tabs=${CLUSTER_TABS} now=${isWebhooks ? "/det/webhooks" : "/det/clusters"} label="Views of the cluster" />
    ${isWebhooks ? html`<${Webhooks} />` : html`<${Machines} />`}
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
