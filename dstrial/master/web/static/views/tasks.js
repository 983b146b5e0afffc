// Commands, TensorBoards and generic tasks: their states, links to their services, and actions.

import { html, useMemo } from "htm/preact/standalone";
import { get, send } from "../api.js";
import { useLive } from "../live.js";
import { attempt, Check, Copy, Problem, SearchField, Select, State } from "../parts/basics.js";
import { confirmAction } from "../parts/dialog.js";
import { filterRows } from "../parts/filter.js";
import { Table, timeColumn, tookColumn } from "../parts/table.js";
import { useFlag, useParam } from "../router.js";

const KINDS = /** @type {Record<string, { name: string, path: string }>} */ ({
  COMMAND: { name: "command", path: "commands" },
  TENSORBOARD: { name: "TensorBoard", path: "tensorboards" },
  GENERIC: { name: "task", path: "tasks" },
});

/** @param {any} row @param {"kill" | "pause" | "unpause"} verb @param {() => void} reload */
async function act(row, verb, reload) {
  const what = `${KINDS[row.kind]?.name ?? "task"} ${row.name || row.id}`;
  if (verb === "kill" && !(await confirmAction(`Kill ${what}${row.kind === "GENERIC" ? " and what it has started" : ""}?`, "Kill"))) return;
  await attempt(() => send("POST", `/api/v1/${KINDS[row.kind].path}/${row.id}/${verb}`, row.kind === "GENERIC" && verb === "kill" ? { taskId: row.id } : {}), `${verb}: ${what}`);
  reload();
}

/** The experiments and trials that a TensorBoard shows. @param {{ row: any }} props */
function Sources({ row }) {
  const links = [
    ...row.experiments.map((/** @type {number} */ id) => html`<a href=${`/det/experiments/${id}`}>experiment ${id}</a>`),
    ...row.trials.map((/** @type {number} */ id) => html`trial ${id}`),
  ];
  return html`<span>${links.slice(0, 5).map((link, idx) => html`${idx ? ", " : ""}${link}`)}${links.length > 5 ? ` and ${links.length - 5} more` : ""}</span>`;
}

const isOver = (/** @type {any} */ row) => ["COMPLETED", "CANCELED", "ERROR"].includes(row.state);

export function Tasks() {
  const { data, error, reload } = useLive((signal) => get("/page/tasks", {}, signal), (topic) => /^(command:|job:|scheduler$)/.test(topic), []);
  const [text, setText] = useParam("filter");
  const [kind, setKind] = useParam("kind");
  const [hidden, setHidden] = useFlag("living");
  const rows = useMemo(() => {
    const kept = (data?.tasks ?? []).filter((/** @type {any} */ row) => (!kind || row.kind === kind) && !(hidden && isOver(row)));
    return filterRows(text, kept, (row, name) => row[name], (row) => [row.id, row.name, row.user, row.kind, row.state].join(" "));
  }, [data, text, kind, hidden]);
  const columns = useMemo(
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "name", title: "Name", value: (row) => row.name || row.id, show: (row) => html`<span title=${row.name}>${row.name || row.id}</span>` },
      { id: "kind", title: "Kind", value: (row) => KINDS[row.kind]?.name ?? row.kind },
      { id: "state", title: "State", value: (row) => row.state, show: (row) => html`<span title=${row.reason}><${State} state=${row.state} /></span>` },
      { id: "open", title: "Open", value: (row) => row.services.join(" "), show: (row) => row.services.map((/** @type {string} */ address, /** @type {number} */ idx) => html`${idx ? " " : ""}<a href=${address} target="_blank" rel="noopener">${row.kind === "TENSORBOARD" && !idx ? "open" : address.slice(address.lastIndexOf(":"), -1)}</a>`) },
      {
        id: "act", title: "Actions", value: () => "",
        show: (row) => html`${row.pausable && row.state === "RUNNING" && html`<button aria-label=${`Pause ${row.name}`} onClick=${() => act(row, "pause", reload)}>Pause</button> `}
          ${row.state === "PAUSED" && html`<button aria-label=${`Go on with ${row.name}`} onClick=${() => act(row, "unpause", reload)}>Go on</button> `}
          ${!isOver(row) && html`<button class="danger" aria-label=${`Kill ${row.name}`} onClick=${() => act(row, "kill", reload)}>Kill</button>`}`,
      },
      { id: "shows", title: "Shows", value: (row) => [...row.experiments, ...row.trials].join(" "), show: (row) => html`<${Sources} row=${row} />` },
      { id: "user", title: "User", value: (row) => row.user },
      { id: "slots", title: "Slots", isNumber: true, value: (row) => row.wanted },
      timeColumn("start", "Started", "start"),
      tookColumn(),
      { id: "reason", title: "How it ended", value: (row) => row.reason, show: (row) => html`<span title=${row.reason}>${row.reason}</span>` },
      { id: "id", title: "ID", isHidden: true, value: (row) => row.id, show: (row) => html`<${Copy} text=${row.id} label=${row.id.slice(0, 8)} />` },
    ]),
    [reload],
  );
  return html`<main>
    <h1 tabindex="-1">Tasks</h1>
    <${Problem} error=${error} />
    <div class="filters">
      <${SearchField} text=${text} set=${setText} label="Filter" placeholder="Filter: words, user:ann, state:running, slots>=2" />
      <${Select} label="Kind" value=${kind} set=${setKind}>
        <option value="">All kinds</option>
        ${Object.entries(KINDS).map(([value, { name }]) => html`<option value=${value}>${name}</option>`)}
      <//>
      <${Check} checked=${hidden} set=${setHidden}>only what has not ended<//>
    </div>
    ${data === null
      ? !error && html`<p class="loading">Loading …</p>`
      : html`<${Table} name="tasks" label="Tasks" columns=${columns} rows=${rows} sort="-start" href=${(/** @type {any} */ row) => `/det/tasks/${row.id}/logs`}
          empty=${data.tasks.length ? "No task fits the filter." : html`No tasks yet. Start one: <code>det command run ls</code>, <code>det tensorboard start EXPERIMENT</code>`} />`}
  </main>`;
}
