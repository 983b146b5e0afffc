// The queue: who is next, why somebody waits, and putting them in another order.

import { html, useMemo } from "htm/preact/standalone";
import { send } from "../../api.js";
import { attempt, Time } from "../../parts/basics.js";
import { askedTexts } from "../../parts/dialog.js";
import { Table } from "../../parts/table.js";

const KINDS = /** @type {Record<string, string>} */ ({ EXPERIMENT: "experiment", COMMAND: "command", TENSORBOARD: "TensorBoard", GENERIC: "task" });

/** @param {Record<string, unknown>} update @param {() => void} reload */
async function reorder(update, reload) {
  await attempt(() => send("POST", "/api/v1/job-queues", { updates: [update] }));
  reload();
}

/** @param {any} row @param {() => void} reload */
async function setPriority(row, reload) {
  const values = await askedTexts(
    `Priority of ${row.name}`,
    [{ name: "priority", label: "Priority", value: String(row.priority), range: [1, 99], hint: "1 is the most urgent, 99 the least" }],
    "Set",
  );
  if (values) await reorder({ jobId: row.id, priority: Number(values.priority) }, reload);
}

/** @param {{ queue: any[], reload: () => void }} props */
export function Queue({ queue, reload }) {
  const columns = useMemo(
    () => [
      { id: "place", title: "Place", isNumber: true, value: (/** @type {any} */ row) => row.ahead + 1 },
      { id: "name", title: "Name", value: (/** @type {any} */ row) => row.name, show: (/** @type {any} */ row) => html`<a href=${row.experiment ? `/det/experiments/${row.experiment}` : `/det/tasks/${row.task}/logs`}>${row.name || row.task}</a> <span class="muted">${KINDS[row.kind] ?? row.kind}${row.experiment ? ` ${row.experiment}` : ""}</span>` },
      { id: "user", title: "User", value: (/** @type {any} */ row) => row.user },
      { id: "priority", title: "Priority", isNumber: true, hint: "1 is the most urgent", value: (/** @type {any} */ row) => row.priority, show: (/** @type {any} */ row) => html`<button aria-label=${`Set the priority of ${row.name}, now ${row.priority}`} onClick=${() => setPriority(row, reload)}>${row.priority}</button>` },
      { id: "held", title: "Slots", isNumber: true, hint: "that it has", value: (/** @type {any} */ row) => row.held },
      { id: "waiting", title: "Waiting", isNumber: true, hint: "how many of it wait for slots", value: (/** @type {any} */ row) => row.waiting },
      { id: "since", title: "Submitted", isHidden: true, value: (/** @type {any} */ row) => row.since, show: (/** @type {any} */ row) => html`<${Time} at=${row.since} />` },
      {
        id: "move", title: "Order", value: () => "",
        show: (/** @type {any} */ row) => html`
          <button aria-label=${`Move ${row.name} ahead`} title="ahead of the one before it" disabled=${row.ahead === 0} onClick=${() => reorder({ jobId: row.id, aheadOf: queue[row.ahead - 1].id }, reload)}>↑</button>${" "}
          <button aria-label=${`Move ${row.name} behind`} title="behind the one after it" disabled=${row.ahead === queue.length - 1} onClick=${() => reorder({ jobId: row.id, behindOf: queue[row.ahead + 1].id }, reload)}>↓</button>`,
      },
      { id: "reason", title: "Why it waits", value: (/** @type {any} */ row) => row.reason, show: (/** @type {any} */ row) => html`<span title=${row.reason}>${row.reason}</span>` },
    ],
    [queue, reload],
  );
  return html`<h2>Queue</h2>
    <${Table} name="queue" label="Queue" columns=${columns} rows=${queue} sort="place" empty="Nothing runs or waits." />`;
}
