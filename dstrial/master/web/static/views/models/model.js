// One model of the registry: its facts, actions and versions.

import { html, useMemo, useState } from "htm/preact/standalone";
import { getAll, send } from "../../api.js";
import { bytes } from "../../format.js";
import { useLive } from "../../live.js";
import { attempt, Copy, Pending, Problem, Time, TrialLinks } from "../../parts/basics.js";
import { askTexts, confirmAction, editFields, labelsOf } from "../../parts/dialog.js";
import { Table, timeColumn } from "../../parts/table.js";
import { navigate } from "../../router.js";

/** @param {any} checkpoint @returns {number} bytes */
const sizeOf = (checkpoint) => Object.values(checkpoint.resources ?? {}).reduce((/** @type {number} */ sum, size) => sum + Number(size), 0);

/** @param {string} text @returns {string} quoted for a shell, if needed */
const quoted = (text) => (/^[\w.\-/]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** @param {string} base path of the model in the API */
const loader = (base) => async (/** @type {AbortSignal} */ signal) => {
  const { items, last } = await getAll(`${base}/versions`, "modelVersions", signal);
  return { model: last.model, versions: items };
};

/** @param {string} base @param {any} model @param {() => void} reload */
async function edit(base, model, reload) {
  const values = await askTexts(`Edit ${model.name}`, editFields(model), "Save");
  if (!values) return;
  const name = values.name.trim();
  if (!(await attempt(() => send("PATCH", base, { name, description: values.description, notes: values.notes, labels: labelsOf(values.labels) }), `saved: ${name}`))) return;
  if (name !== model.name) navigate(`/det/models/${encodeURIComponent(name)}`, { replace: true });
  else reload();
}

/** The details of one version. @param {{ model: any, row: any }} props */
function Version({ model, row }) {
  const { checkpoint } = row;
  const { training = {} } = checkpoint;
  return html`<section class="panel" aria-labelledby="version">
    <h2 id="version" tabindex="-1">Version ${row.version}${row.name ? `: ${row.name}` : ""}</h2>
    <div class="facts">
      <span>by ${row.username}, <${Time} at=${row.creationTime} /></span>
      ${training.experimentId && html`<span><${TrialLinks} trial=${training.trialId} experiment=${training.experimentId} /></span>`}
      <span>${bytes(sizeOf(checkpoint))} in ${Object.keys(checkpoint.resources ?? {}).length} files</span>
      <span>${String(checkpoint.state ?? "").replace("STATE_", "").toLowerCase()}</span>
      ${(row.labels ?? []).map((/** @type {string} */ label) => html`<span class="label">${label}</span>`)}
    </div>
    ${row.comment && html`<p>${row.comment}</p>`}
    ${row.notes && html`<pre tabindex="0">${row.notes}</pre>`}
    <p><${Copy} text=${`det checkpoint download ${checkpoint.uuid}`} /></p>
    <p><${Copy} text=${`dstrial checkpoint inspect ${checkpoint.uuid}`} /></p>
    <p><${Copy} text=${`det model describe ${quoted(model.name)} --version ${row.version}`} /></p>
  </section>`;
}

/** @param {{ name: string }} props */
export function Model({ name }) {
  const base = `/api/v1/models/${encodeURIComponent(name)}`;
  const { data, error, reload } = useLive(loader(base), (topic) => topic === "models", [base]);
  const [open, setOpen] = useState(/** @type {number | null} */ (null));
  const columns = useMemo(
    () => /** @type {import("../../parts/table.js").Column[]} */ ([
      { id: "version", title: "Version", value: (row) => row.version, show: (row) => html`<button aria-expanded=${row.version === open} aria-label=${`Show version ${row.version}`} onClick=${() => setOpen(row.version === open ? null : row.version)}>${row.version}</button>` },
      { id: "name", title: "Name", value: (row) => row.name },
      { id: "comment", title: "Comment", value: (row) => row.comment, show: (row) => html`<span title=${row.comment}>${row.comment}</span>` },
      { id: "labels", title: "Labels", value: (row) => (row.labels ?? []).join(", "), show: (row) => (row.labels ?? []).map((/** @type {string} */ label) => html`<span class="label">${label}</span> `) },
      { id: "checkpoint", title: "Checkpoint", value: (row) => row.checkpoint.uuid, show: (row) => html`<${Copy} text=${row.checkpoint.uuid} label=${row.checkpoint.uuid.slice(0, 8)} />` },
      { id: "trial", title: "Trial", isNumber: true, value: (row) => row.checkpoint.training?.trialId, show: (row) => row.checkpoint.training?.trialId && html`<a href=${`/det/experiments/${row.checkpoint.training.experimentId}/trials/${row.checkpoint.training.trialId}`}>${row.checkpoint.training.trialId}</a>` },
      { id: "size", title: "Size", isNumber: true, value: (row) => sizeOf(row.checkpoint), show: (row) => bytes(sizeOf(row.checkpoint)) },
      { id: "user", title: "User", value: (row) => row.username },
      timeColumn("created", "Registered", "creationTime"),
      {
        id: "act", title: "Actions", value: () => "",
        show: (row) => html`<button class="danger" aria-label=${`Delete version ${row.version}`} onClick=${async () => {
            if (!(await confirmAction(`Delete version ${row.version} of ${name}? Its checkpoint stays, and may be collected then.`, "Delete"))) return;
            await attempt(() => send("DELETE", `${base}/versions/${row.version}`), `deleted: version ${row.version}`);
            reload();
          }}>Delete</button>`,
      },
    ]),
    [base, open, reload],
  );
  if (!data) return html`<main><h1 tabindex="-1">${name}</h1><${Pending} error=${error}><p><a href="/det/models">All models</a></p><//></main>`;
  const { model } = data;
  const versions = data.versions.map((/** @type {any} */ row) => ({ ...row, id: row.version }));
  const shown = versions.find((/** @type {any} */ row) => row.version === open);
  const archive = model.archived ? "unarchive" : "archive";
  return html`<main>
    <p class="muted"><a href="/det/models">Models</a></p>
    <h1 tabindex="-1">${model.name}</h1>
    <${Problem} error=${error} />
    <div class="facts">
      ${model.archived && html`<b>archived</b>`}
      <span>${model.numVersions} ${model.numVersions === 1 ? "version" : "versions"}</span>
      <span>by ${model.username}, <${Time} at=${model.creationTime} /></span>
      ${model.labels.map((/** @type {string} */ label) => html`<span class="label">${label}</span>`)}
    </div>
    ${model.description && html`<p>${model.description}</p>`}
    ${model.notes && html`<pre tabindex="0">${model.notes}</pre>`}
    <div class="tools">
      <button disabled=${model.archived} onClick=${() => edit(base, model, reload)}>Edit</button>
      <button onClick=${async () => (await attempt(() => send("POST", `${base}/${archive}`), `${archive}d: ${model.name}`)) && reload()}>${model.archived ? "Unarchive" : "Archive"}</button>
      <button class="danger" onClick=${async () => {
        if (!(await confirmAction(`Delete model ${model.name} with its ${model.numVersions} versions? Their checkpoints stay, and may be collected then.`, "Delete"))) return;
        if (await attempt(() => send("DELETE", base), `deleted: ${model.name}`)) navigate("/det/models");
      }}>Delete</button>
    </div>
    ${shown && html`<${Version} model=${model} row=${shown} />`}
    <h2>Versions</h2>
    <${Table} name="versions" label="Versions" columns=${columns} rows=${versions} sort="-version"
      empty=${html`No versions yet. Register a checkpoint of an experiment, or by <code>det model register-version ${quoted(model.name)} UUID</code>`} />
  </main>`;
}
