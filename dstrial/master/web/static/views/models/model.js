// One model of the registry with its versions.

import { html, useMemo, useState } from "htm/preact/standalone";
import { get, send } from "../../api.js";
import { bytes } from "../../format.js";
import { useLive } from "../../live.js";
import { attempt, Copy, Problem, Time } from "../../parts/basics.js";
import { askedTexts, confirmed, labelsOf } from "../../parts/dialog.js";
import { Table } from "../../parts/table.js";
import { navigate } from "../../router.js";

/** @param {any} checkpoint @returns {number} */
const sizeOf = (checkpoint) => Object.values(checkpoint.resources ?? {}).reduce((/** @type {number} */ sum, size) => sum + Number(size), 0);

/** @param {string} text @returns {string} a word for a shell */
const quoted = (text) => (/^[\w.\-/]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** @param {string} base */
const loader = (base) => async (/** @type {AbortSignal} */ signal) => {
  /** @type {any[]} */
  const versions = [];
  for (;;) {
    const { model, modelVersions, pagination } = await get(`${base}/versions`, { offset: versions.length, limit: 1000 }, signal);
    versions.push(...modelVersions);
    if (!modelVersions.length || versions.length >= pagination.total) return { model, versions };
  }
};

/** @param {string} base @param {any} model @param {() => void} reload */
async function edit(base, model, reload) {
  const values = await askedTexts(`Edit ${model.name}`, [
    { name: "name", label: "Name", value: model.name, isRequired: true },
    { name: "description", label: "Description", value: model.description },
    { name: "labels", label: "Labels", value: model.labels.join(", "), hint: "with commas between" },
    { name: "notes", label: "Notes", value: model.notes, isLong: true },
  ], "Save");
  if (!values) return;
  const name = values.name.trim();
  if (!(await attempt(() => send("PATCH", base, { name, description: values.description, notes: values.notes, labels: labelsOf(values.labels) }), `saved: ${name}`))) return;
  if (name !== model.name) navigate(`/det/models/${encodeURIComponent(name)}`, { replace: true });
  else reload();
}

/** @param {{ model: any, row: any }} props everything of one version */
function Version({ model, row }) {
  const { checkpoint } = row;
  const { training = {} } = checkpoint;
  return html`<section class="panel" aria-labelledby="version">
    <h2 id="version" tabindex="-1">Version ${row.version}${row.name ? `: ${row.name}` : ""}</h2>
    <div class="facts">
      <span>by ${row.username}, <${Time} at=${row.creationTime} /></span>
      ${training.experimentId && html`<span><a href=${`/det/experiments/${training.experimentId}/trials/${training.trialId}`}>trial ${training.trialId}</a> of <a href=${`/det/experiments/${training.experimentId}`}>experiment ${training.experimentId}</a></span>`}
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
    () => [
      { id: "version", title: "Version", value: (/** @type {any} */ row) => row.version, show: (/** @type {any} */ row) => html`<button aria-expanded=${row.version === open} aria-label=${`Show version ${row.version}`} onClick=${() => setOpen(row.version === open ? null : row.version)}>${row.version}</button>` },
      { id: "name", title: "Name", value: (/** @type {any} */ row) => row.name },
      { id: "comment", title: "Comment", value: (/** @type {any} */ row) => row.comment, show: (/** @type {any} */ row) => html`<span title=${row.comment}>${row.comment}</span>` },
      { id: "labels", title: "Labels", value: (/** @type {any} */ row) => (row.labels ?? []).join(", "), show: (/** @type {any} */ row) => (row.labels ?? []).map((/** @type {string} */ label) => html`<span class="label">${label}</span> `) },
      { id: "checkpoint", title: "Checkpoint", value: (/** @type {any} */ row) => row.checkpoint.uuid, show: (/** @type {any} */ row) => html`<${Copy} text=${row.checkpoint.uuid} label=${row.checkpoint.uuid.slice(0, 8)} />` },
      { id: "trial", title: "Trial", isNumber: true, value: (/** @type {any} */ row) => row.checkpoint.training?.trialId, show: (/** @type {any} */ row) => row.checkpoint.training?.trialId && html`<a href=${`/det/experiments/${row.checkpoint.training.experimentId}/trials/${row.checkpoint.training.trialId}`}>${row.checkpoint.training.trialId}</a>` },
      { id: "size", title: "Size", isNumber: true, value: (/** @type {any} */ row) => sizeOf(row.checkpoint), show: (/** @type {any} */ row) => bytes(sizeOf(row.checkpoint)) },
      { id: "user", title: "User", value: (/** @type {any} */ row) => row.username },
      { id: "created", title: "Registered", value: (/** @type {any} */ row) => row.creationTime, show: (/** @type {any} */ row) => html`<${Time} at=${row.creationTime} />` },
      {
        id: "act", title: "Actions", value: () => "",
        show: (/** @type {any} */ row) => html`<button class="danger" aria-label=${`Delete version ${row.version}`} onClick=${async () => {
            if (!(await confirmed(`Delete version ${row.version} of ${name}? Its checkpoint stays, and may be collected then.`, "Delete"))) return;
            await attempt(() => send("DELETE", `${base}/versions/${row.version}`), `deleted: version ${row.version}`);
            reload();
          }}>Delete</button>`,
      },
    ],
    [base, open, reload],
  );
  if (!data) return html`<main><h1 tabindex="-1">${name}</h1>${error ? html`<${Problem} error=${error} /><p><a href="/det/models">All models</a></p>` : html`<p class="loading">Loading …</p>`}</main>`;
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
        if (!(await confirmed(`Delete model ${model.name} with its ${model.numVersions} versions? Their checkpoints stay, and may be collected then.`, "Delete"))) return;
        if (await attempt(() => send("DELETE", base), `deleted: ${model.name}`)) navigate("/det/models");
      }}>Delete</button>
    </div>
    ${shown && html`<${Version} model=${model} row=${shown} />`}
    <h2>Versions</h2>
    <${Table} name="versions" label="Versions" columns=${columns} rows=${versions} sort="-version"
      empty=${html`No versions yet. Register a checkpoint of an experiment, or by <code>det model register-version ${quoted(model.name)} UUID</code>`} />
  </main>`;
}
