// Webhooks: what each is told of, and how sending goes. Of an address only the host is known here.

import { html, useMemo } from "htm/preact/standalone";
import { get, send } from "../../api.js";
import { useLive } from "../../live.js";
import { attempt, Problem, Time } from "../../parts/basics.js";
import { confirmed } from "../../parts/dialog.js";
import { Table } from "../../parts/table.js";

/** @param {any} row @param {() => void} reload */
async function tryOut(row, reload) {
  await attempt(() => send("POST", `/api/v1/webhooks/${row.id}/test`), `${row.name} has taken a test event`);
  reload();
}

/** @param {any} row @param {() => void} reload */
async function remove(row, reload) {
  if (!(await confirmed(`Delete webhook ${row.name}, and what waits to be sent to it?`, "Delete"))) return;
  await attempt(() => send("DELETE", `/api/v1/webhooks/${row.id}`), `deleted: ${row.name}`);
  reload();
}

export function Webhooks() {
  const { data, error, reload } = useLive((signal) => get("/page/webhooks", {}, signal), (topic) => topic.startsWith("webhook"), []);
  const columns = useMemo(
    () => [
      { id: "name", title: "Name", value: (/** @type {any} */ row) => row.name },
      { id: "triggers", title: "Told of", value: (/** @type {any} */ row) => row.triggers.join(", "), show: (/** @type {any} */ row) => html`<span title=${row.triggers.join(", ")}>${row.triggers.join(", ")}</span>` },
      { id: "url", title: "Host", value: (/** @type {any} */ row) => row.url },
      { id: "delivered", title: "Sent", isNumber: true, value: (/** @type {any} */ row) => row.delivered },
      { id: "failed", title: "Failed", isNumber: true, value: (/** @type {any} */ row) => row.failed },
      { id: "dropped", title: "Dropped", isNumber: true, hint: "too many waited", value: (/** @type {any} */ row) => row.dropped },
      { id: "waiting", title: "Waiting", isNumber: true, value: (/** @type {any} */ row) => row.waiting },
      { id: "last", title: "Last", value: (/** @type {any} */ row) => row.last, show: (/** @type {any} */ row) => html`<${Time} at=${row.last} /> <span class="muted">${row.result}</span>` },
      { id: "mode", title: "Mode", isHidden: true, value: (/** @type {any} */ row) => row.mode },
      {
        id: "act", title: "Actions", value: () => "",
        show: (/** @type {any} */ row) => html`<button aria-label=${`Test ${row.name}`} onClick=${() => tryOut(row, reload)}>Test</button>${" "}
          <button class="danger" aria-label=${`Delete ${row.name}`} onClick=${() => remove(row, reload)}>Delete</button>`,
      },
    ],
    [reload],
  );
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`;
  return html`<${Problem} error=${error} />
    <h2>Webhooks</h2>
    <p class="muted">Of an address only the host is shown: the rest may be a secret.</p>
    <${Table} name="webhooks" label="Webhooks" columns=${columns} rows=${data.webhooks} sort="name"
      empty=${html`No webhooks. Make one: <code>dstrial webhook create NAME URL</code>`} />`;
}
