// The cluster: nodes, slots and who uses them, and the queue with why jobs wait.

import { html, useMemo } from "htm/preact/standalone";
import { get, send } from "../api.js";
import { useLive } from "../live.js";
import { attempt, Pending, Problem, Time, TrialLinks } from "../parts/basics.js";
import { askTexts, confirmAction } from "../parts/dialog.js";
import { Table, timeColumn } from "../parts/table.js";

const TOPIC = /^(scheduler$|experiment:|command:|job:)/;
const BACKENDS = /** @type {Record<string, string>} */ ({ local: "this machine", hosts: "hosts over ssh", slurm: "jobs of Slurm", ray: "placement groups of Ray" });

export function Cluster() {
  const { data, error, reload } = useLive((signal) => get("/page/cluster", {}, signal), (topic) => TOPIC.test(topic), []);
  if (!data) return html`<main><h1 tabindex="-1">Cluster</h1><${Pending} error=${error} /></main>`;
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

/** The state of Slurm or Ray, which provides the nodes. @param {{ engine: any }} props */
function Engine({ engine }) {
  return html`<h2>${engine.name}</h2>
    ${engine.away && html`<p class="problem" role="alert">${engine.away}</p>`}
    ${engine.jobs.length ? html`<ul>${engine.jobs.map((/** @type {string} */ job) => html`<li>${job}</li>`)}</ul>` : html`<p class="muted">No jobs.</p>`}`;
}

/** A node or slot that can be disabled; `path` is that of its API requests. @typedef {{ path: string, name: string, isOff: boolean }} Switch */

/** @param {Switch} what @param {"enable" | "disable" | "drain"} how @param {() => void} reload */
async function change({ path, name }, how, reload) {
  const question = how === "drain"
    ? `Drain ${name}? What runs there may finish; nothing new begins.`
    : `Disable ${name}? What runs there is stopped at once, and goes on where there is room.`;
  if (how !== "enable" && !(await confirmAction(question, how === "drain" ? "Drain" : "Disable"))) return;
  const word = how === "enable" ? "enable" : "disable";
  await attempt(() => send("POST", `${path}/${word}`, how === "drain" ? { drain: true } : {}), `${how === "drain" ? "drained" : `${how}d`}: ${name}`);
  reload();
}

/** @param {{ what: Switch, reload: () => void }} props */
function Switches({ what, reload }) {
  const { name } = what;
  return what.isOff
    ? html`<button aria-label=${`Enable ${name}`} onClick=${() => change(what, "enable", reload)}>Enable</button>`
    : html`<button aria-label=${`Drain ${name}`} onClick=${() => change(what, "drain", reload)}>Drain</button>${" "}
        <button class="danger" aria-label=${`Disable ${name}`} onClick=${() => change(what, "disable", reload)}>Disable</button>`;
}

/** The task that uses a slot, with links. @param {{ holder: any }} props */
function SlotUser({ holder }) {
  if (!holder) return html`<span class="muted">free</span>`;
  const text = `${holder.state === "RUNNING" ? "" : `${holder.state.toLowerCase()}: `}`;
  return holder.trial
    ? html`${text}<${TrialLinks} trial=${holder.trial} experiment=${holder.experiment} />`
    : html`${text}<a href=${`/det/tasks/${holder.task}/logs`}>${holder.title || holder.task}</a>`;
}

/** @param {any} node @returns {string} */
function nodeState(node) {
  if (node.down !== null) return "down";
  return node.enabled ? "up" : node.draining ? "draining" : "disabled";
}

/** @param {any} row @returns {string} */
function slotState({ node, slot }) {
  if (node.down !== null) return "node down";
  if (!slot.enabled) return slot.draining ? "draining" : "disabled";
  return slot.holder ? "in use" : "free";
}

/** @param {{ nodes: any[], holders: Record<string, any>, reload: () => void }} props */
function Nodes({ nodes, holders, reload }) {
  const rows = useMemo(
    () => nodes.flatMap((node) => node.slots.map((/** @type {any} */ slot) => ({ id: `${node.name} ${slot.slot}`, node, slot, holder: holders[slot.holder] }))),
    [nodes, holders],
  );
  const columns = useMemo(
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "slot", title: "Slot", value: (row) => `${row.node.name} ${row.slot.slot}` },
      { id: "device", title: "Device", value: (row) => row.slot.brand || row.slot.kind, show: (row) => html`<span title=${row.slot.uuid}>${row.slot.brand || row.slot.kind}</span>` },
      { id: "state", title: "State", value: slotState },
      { id: "holder", title: "Used by", value: (row) => row.holder?.title ?? "", show: (row) => html`<${SlotUser} holder=${row.holder} />` },
      { id: "since", title: "Since", value: (row) => row.holder?.since ?? "", show: (row) => html`<${Time} at=${row.holder?.since ?? null} />` },
      { id: "switch", title: "Switch", value: () => "", show: (row) => row.node.enabled && html`<${Switches} reload=${reload}
          what=${{ path: `/api/v1/agents/${encodeURIComponent(row.node.name)}/slots/${row.slot.slot}`, name: `slot ${row.slot.slot} of ${row.node.name}`, isOff: !row.slot.enabled }} />` },
    ]),
    [reload],
  );
  const numUsed = (/** @type {any} */ node) => node.slots.filter((/** @type {any} */ slot) => slot.holder).length;
  // Tasks without slots run on the master's machine.
  const others = Object.values(holders).filter((one) => !one.slots);
  return html`<h2>Nodes</h2>
    <div class="scroller wide" tabindex="0" role="region" aria-label="Nodes"><table class="plain">
      <thead><tr><th scope="col">Node</th><th scope="col">State</th><th scope="col" class="number">Slots in use</th><th scope="col">Switch</th></tr></thead>
      <tbody>${nodes.map((node) => html`<tr key=${node.name}>
        <th scope="row">${node.name} <span class="muted">${node.address}</span></th>
        <td><span class=${`state ${nodeState(node) === "up" ? "COMPLETED" : nodeState(node) === "down" ? "ERROR" : "PAUSED"}`}>${nodeState(node)}</span>
          ${node.down !== null && html`<div class="problem">${node.down}</div>`}</td>
        <td class="number">${numUsed(node)} of ${node.slots.length}</td>
        <td><${Switches} reload=${reload} what=${{ path: `/api/v1/agents/${encodeURIComponent(node.name)}`, name: node.name, isOff: !node.enabled }} /></td>
      </tr>`)}</tbody>
    </table></div>
    ${others.length > 0 && html`<p>Without slots: ${others.map((one, idx) => html`${idx ? ", " : ""}<${SlotUser} holder=${one} />`)}</p>`}
    <h2>Slots</h2>
    <${Table} name="slots" label="Slots" columns=${columns} rows=${rows} empty="No node offers slots now." />`;
}

const KINDS = /** @type {Record<string, string>} */ ({ EXPERIMENT: "experiment", COMMAND: "command", TENSORBOARD: "TensorBoard", GENERIC: "task" });

/** @param {Record<string, unknown>} update @param {() => void} reload */
async function reorder(update, reload) {
  await attempt(() => send("POST", "/api/v1/job-queues", { updates: [update] }));
  reload();
}

/** @param {any} row @param {() => void} reload */
async function setPriority(row, reload) {
  const values = await askTexts(
    `Priority of ${row.name}`,
    [{ name: "priority", label: "Priority", value: String(row.priority), range: [1, 99], hint: "1 is the most urgent, 99 the least" }],
    "Set",
  );
  if (values) await reorder({ jobId: row.id, priority: Number(values.priority) }, reload);
}

/** @param {{ queue: any[], reload: () => void }} props */
function Queue({ queue, reload }) {
  const columns = useMemo(
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "place", title: "Place", isNumber: true, value: (row) => row.ahead + 1 },
      { id: "name", title: "Name", value: (row) => row.name, show: (row) => html`<a href=${row.experiment ? `/det/experiments/${row.experiment}` : `/det/tasks/${row.task}/logs`}>${row.name || row.task}</a> <span class="muted">${KINDS[row.kind] ?? row.kind}${row.experiment ? ` ${row.experiment}` : ""}</span>` },
      { id: "user", title: "User", value: (row) => row.user },
      { id: "priority", title: "Priority", isNumber: true, hint: "1 is the most urgent", value: (row) => row.priority, show: (row) => html`<button aria-label=${`Set the priority of ${row.name}, now ${row.priority}`} onClick=${() => setPriority(row, reload)}>${row.priority}</button>` },
      { id: "held", title: "Slots", isNumber: true, hint: "that it has", value: (row) => row.held },
      { id: "waiting", title: "Waiting", isNumber: true, hint: "how many of it wait for slots", value: (row) => row.waiting },
      timeColumn("since", "Submitted", "since", { isHidden: true }),
      {
        id: "move", title: "Order", value: () => "",
        show: (row) => html`
          <button aria-label=${`Move ${row.name} ahead`} title="ahead of the one before it" disabled=${row.ahead === 0} onClick=${() => reorder({ jobId: row.id, aheadOf: queue[row.ahead - 1].id }, reload)}>↑</button>${" "}
          <button aria-label=${`Move ${row.name} behind`} title="behind the one after it" disabled=${row.ahead === queue.length - 1} onClick=${() => reorder({ jobId: row.id, behindOf: queue[row.ahead + 1].id }, reload)}>↓</button>`,
      },
      { id: "reason", title: "Why it waits", value: (row) => row.reason, show: (row) => html`<span title=${row.reason}>${row.reason}</span>` },
    ]),
    [queue, reload],
  );
  return html`<h2>Queue</h2>
    <${Table} name="queue" label="Queue" columns=${columns} rows=${queue} sort="place" empty="Nothing runs or waits." />`;
}
