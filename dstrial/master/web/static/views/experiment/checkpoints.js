// An experiment's checkpoints: layout, size, commands that use them; register and delete them.

import { html, useState } from "htm/preact/standalone";
import { get, send } from "../../api.js";
import { bytes, number } from "../../format.js";
import { useLive } from "../../live.js";
import { attempt, Check, Copy, Pending, Problem, State } from "../../parts/basics.js";
import { askTexts, confirmAction } from "../../parts/dialog.js";
import { Table, timeColumn } from "../../parts/table.js";
import { useFlag, useParam } from "../../router.js";

/** @param {any} layout of one engine's state in a checkpoint @returns {string} such as "4 ranks, ZeRO 2" */
function layoutText(layout) {
  const parts = [`${layout.world_size} ${layout.world_size === 1 ? "rank" : "ranks"}`, `ZeRO ${layout.zero_stage}`];
  if (layout.pipeline_stages > 1) parts.push(`${layout.pipeline_stages} stages`);
  if (layout.model_parallel_size > 1) parts.push(`${layout.model_parallel_size} model parallel`);
  if (layout.data_parallel_size > 1) parts.push(`${layout.data_parallel_size} replicas`);
  if (layout.offload_optimizer && layout.offload_optimizer !== "none") parts.push(`optimizer on ${layout.offload_optimizer}`);
  return parts.join(", ");
}

/** @param {any} row @returns {string} */
const layoutOf = (row) => (row.layouts.length ? row.layouts.map(layoutText).join(" + ") : row.format ? `${row.format}` : "not told");
const hasFiles = (/** @type {any} */ row) => row.state === "COMPLETED" || row.state === "PARTIALLY_DELETED";

/** All checkpoints, or those of one trial. @param {{ id: number, experiment: any, trial?: number }} props */
export function Checkpoints({ id, experiment, trial }) {
  const [selected, setSelected] = useState(/** @type {Set<string>} */ (new Set()));
  const [shown, setShown] = useParam("checkpoint");
  const [withDeleted, setWithDeleted] = useFlag("deleted");
  const { data, error, reload } = useLive((signal) => get(`/page/experiments/${id}/checkpoints`, {}, signal), (topic) => topic === `experiment:${id}` || topic.startsWith("trial:"), [id]);
  if (!data) return html`<${Pending} error=${error} />`;
  const all = data.checkpoints.filter((/** @type {any} */ row) => !trial || row.trial === trial);
  const rows = withDeleted ? all : all.filter((/** @type {any} */ row) => row.state !== "DELETED");
  const chosen = rows.filter((/** @type {any} */ row) => selected.has(row.id) && hasFiles(row));
  const one = all.find((/** @type {any} */ row) => row.id === shown);
  const remove = async (/** @type {any[]} */ some) => {
    const size = bytes(some.reduce((sum, row) => sum + row.bytes, 0));
    const what = some.length === 1 ? `checkpoint ${some[0].id} of trial ${some[0].trial}` : `${some.length} checkpoints`;
    if (!(await confirmAction(`Delete ${what}, ${size}? The files cannot be brought back.`, "Delete"))) return;
    if (await attempt(() => send("DELETE", "/api/v1/checkpoints", { checkpointUuids: some.map((row) => row.id) }), `${what}: being deleted`)) {
      setSelected(new Set());
      reload();
    }
  };
  const register = async (/** @type {any} */ row) => {
    const values = await askTexts("Register as a model version", [
      { name: "model", label: "Model", isRequired: true, hint: "the name of one of Models" },
      { name: "name", label: "Name of the version" },
      { name: "comment", label: "Comment" },
    ], "Register");
    if (!values) return;
    const path = `/api/v1/models/${encodeURIComponent(values.model.trim())}/versions`;
    await attempt(() => send("POST", path, { checkpointUuid: row.id, name: values.name, comment: values.comment }), `registered: checkpoint ${row.id}`);
    reload();
  };
  return html`
    <${Problem} error=${error} />
    <div class="filters">
      <${Check} checked=${withDeleted} set=${setWithDeleted}>with deleted ones (${all.filter((/** @type {any} */ row) => row.state === "DELETED").length})<//>
      <span class="muted">${bytes(all.filter(hasFiles).reduce((/** @type {number} */ sum, /** @type {any} */ row) => sum + row.bytes, 0))} in all</span>
      ${data.more && html`<span class="muted">Only the newest ${data.checkpoints.length} of the experiment are listed.</span>`}
    </div>
    <${Table} name="checkpoints" label="Checkpoints" rows=${rows} sort="-time" selected=${selected} onSelect=${setSelected}
      rowClass=${(/** @type {any} */ row) => (row.id === shown ? "chosen" : "")}
      tools=${chosen.length > 0 && html`<button class="danger" onClick=${() => remove(chosen)}>Delete ${chosen.length}</button>`}
      empty=${all.length ? "All have been deleted." : "No checkpoints yet. Trials save one when they are paused or stopped, at `min_checkpoint_period`, and at their end."}
      columns=${/** @type {import("../../parts/table.js").Column[]} */ ([
        { id: "uuid", title: "Checkpoint", value: (row) => row.id, show: (row) => html`<button class="plain" aria-expanded=${row.id === shown} title=${row.id} onClick=${() => setShown(row.id === shown ? "" : row.id)}>${row.id.slice(0, 8)}…</button>` },
        { id: "trial", title: "Trial", isNumber: true, value: (row) => row.trial, show: (row) => html`<a href=${`/det/experiments/${id}/trials/${row.trial}`}>${row.trial}${row.trial === experiment.bestTrial ? " ★" : ""}</a>` },
        { id: "batch", title: "Batch", isNumber: true, value: (row) => row.batch },
        { id: "metric", title: experiment.metric, isNumber: true, value: (row) => row.metric, show: (row) => number(row.metric) },
        { id: "size", title: "Size", isNumber: true, value: (row) => row.bytes, show: (row) => bytes(row.bytes) },
        { id: "state", title: "State", value: (row) => row.state, show: (row) => html`<${State} state=${row.state} />` },
        { id: "layout", title: "Layout", value: layoutOf },
        { id: "files", title: "Files", isNumber: true, isHidden: true, value: (row) => row.files },
        { id: "models", title: "Model", value: (row) => row.models.map((/** @type {any} */ model) => `${model.name} v${model.version}`).join(", ") },
        timeColumn("time", "Saved", "time"),
      ])} />
    ${one && html`<${Details} row=${one} experiment=${experiment} onDelete=${() => remove([one])} onRegister=${() => register(one)} onClose=${() => setShown("")} />`}
    ${shown && !one && html`<p class="problem" role="alert">Checkpoint ${shown} is not, or no more, one of this experiment.</p>`}`;
}

/** @param {{ row: any, experiment: any, onDelete: () => void, onRegister: () => void, onClose: () => void }} props */
function Details({ row, experiment, onDelete, onRegister, onClose }) {
  const lines = [
    ["Download", `det checkpoint download ${row.id}`],
    ["Verify every byte", `dstrial checkpoint verify ${row.id}`],
    ["Look inside", `dstrial checkpoint inspect ${row.id}`],
    ["Start from these weights", `det experiment create CONFIG.yaml . --config searcher.source_checkpoint_uuid=${row.id}`],
    ...(experiment.searcher === "single" && !experiment.unmanaged ? [["Go on with this trial", `det experiment continue ${experiment.id}`]] : []),
  ];
  return html`<section class="details" aria-label=${`Checkpoint ${row.id}`}>
    <h2>Checkpoint ${row.id}</h2>
    <div class="tools">
      ${hasFiles(row) && html`<button onClick=${onRegister}>Register as a model version …</button><button class="danger" onClick=${onDelete}>Delete</button>`}
      <button onClick=${onClose}>Close</button>
    </div>
    ${row.layouts.map((/** @type {any} */ layout, /** @type {number} */ idx) => html`<p>${row.layouts.length > 1 ? `Engine ${idx + 1}: ` : ""}${layoutText(layout)}; ${layout.engine_kind?.replace("_", " ")} engine, ${layout.optimizer || "no optimizer"}, batches of ${layout.train_batch_size}</p>`)}
    ${row.manifest && html`<p class="muted">SHA-256 of its manifest, as its trial has reported it: <code>${row.manifest}</code></p>`}
    <table class="plain"><tbody>${lines.map(([title, text]) => html`<tr><th scope="row">${title}</th><td><${Copy} text=${text} /></td></tr>`)}</tbody></table>
  </section>`;
}
