// Nodes with their slots: who uses each, and switching them on and off.

import { html, useMemo } from "htm/preact/standalone";
import { send } from "../../api.js";
import { attempt, Time } from "../../parts/basics.js";
import { confirmed } from "../../parts/dialog.js";
import { Table } from "../../parts/table.js";

/** @typedef {{ path: string, name: string, isOff: boolean }} Switch */

/** @param {Switch} what @param {"enable" | "disable" | "drain"} how @param {() => void} reload */
async function change({ path, name }, how, reload) {
  const question = how === "drain"
    ? `Drain ${name}? What runs there may finish; nothing new begins.`
    : `Disable ${name}? What runs there is stopped at once, and goes on where there is room.`;
  if (how !== "enable" && !(await confirmed(question, how === "drain" ? "Drain" : "Disable"))) return;
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

/** @param {{ holder: any }} props */
function Holder({ holder }) {
  if (!holder) return html`<span class="muted">free</span>`;
  const text = `${holder.state === "RUNNING" ? "" : `${holder.state.toLowerCase()}: `}`;
  return holder.trial
    ? html`${text}<a href=${`/det/experiments/${holder.experiment}/trials/${holder.trial}`}>trial ${holder.trial}</a> of <a href=${`/det/experiments/${holder.experiment}`}>experiment ${holder.experiment}</a>`
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
export function Nodes({ nodes, holders, reload }) {
  const rows = useMemo(
    () => nodes.flatMap((node) => node.slots.map((/** @type {any} */ slot) => ({ id: `${node.name} ${slot.slot}`, node, slot, holder: holders[slot.holder] }))),
    [nodes, holders],
  );
  const columns = useMemo(
    () => [
      { id: "slot", title: "Slot", value: (/** @type {any} */ row) => `${row.node.name} ${row.slot.slot}` },
      { id: "device", title: "Device", value: (/** @type {any} */ row) => row.slot.brand || row.slot.kind, show: (/** @type {any} */ row) => html`<span title=${row.slot.uuid}>${row.slot.brand || row.slot.kind}</span>` },
      { id: "state", title: "State", value: slotState },
      { id: "holder", title: "Used by", value: (/** @type {any} */ row) => row.holder?.title ?? "", show: (/** @type {any} */ row) => html`<${Holder} holder=${row.holder} />` },
      { id: "since", title: "Since", value: (/** @type {any} */ row) => row.holder?.since ?? "", show: (/** @type {any} */ row) => html`<${Time} at=${row.holder?.since ?? null} />` },
      { id: "switch", title: "Switch", value: () => "", show: (/** @type {any} */ row) => row.node.enabled && html`<${Switches} reload=${reload}
          what=${{ path: `/api/v1/agents/${encodeURIComponent(row.node.name)}/slots/${row.slot.slot}`, name: `slot ${row.slot.slot} of ${row.node.name}`, isOff: !row.slot.enabled }} />` },
    ],
    [reload],
  );
  const held = (/** @type {any} */ node) => node.slots.filter((/** @type {any} */ slot) => slot.holder).length;
  // What has no slots runs on the master's machine.
  const others = Object.values(holders).filter((one) => !one.slots);
  return html`<h2>Nodes</h2>
    <div class="scroller wide" tabindex="0" role="region" aria-label="Nodes"><table class="plain">
      <thead><tr><th scope="col">Node</th><th scope="col">State</th><th scope="col" class="number">Slots in use</th><th scope="col">Switch</th></tr></thead>
      <tbody>${nodes.map((node) => html`<tr key=${node.name}>
        <th scope="row">${node.name} <span class="muted">${node.address}</span></th>
        <td><span class=${`state ${nodeState(node) === "up" ? "COMPLETED" : nodeState(node) === "down" ? "ERROR" : "PAUSED"}`}>${nodeState(node)}</span>
          ${node.down !== null && html`<div class="problem">${node.down}</div>`}</td>
        <td class="number">${held(node)} of ${node.slots.length}</td>
        <td><${Switches} reload=${reload} what=${{ path: `/api/v1/agents/${encodeURIComponent(node.name)}`, name: node.name, isOff: !node.enabled }} /></td>
      </tr>`)}</tbody>
    </table></div>
    ${others.length > 0 && html`<p>Without slots: ${others.map((one, idx) => html`${idx ? ", " : ""}<${Holder} holder=${one} />`)}</p>`}
    <h2>Slots</h2>
    <${Table} name="slots" label="Slots" columns=${columns} rows=${rows} empty="No node offers slots now." />`;
}
