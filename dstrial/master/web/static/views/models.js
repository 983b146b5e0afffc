// The registry: models, and in each the checkpoints that are its versions.

import { html, useMemo } from "htm/preact/standalone";
import { get, send } from "../api.js";
import { useLive } from "../live.js";
import { attempt, Problem, Time } from "../parts/basics.js";
import { filterRows } from "../parts/filter.js";
import { askedTexts, labelsOf } from "../parts/dialog.js";
import { Table } from "../parts/table.js";
import { navigate, useParam } from "../router.js";
import { Model } from "./models/model.js";

/** @param {{ words: string[] }} props */
export function Models({ words }) {
  return words[1] ? html`<${Model} name=${words[1]} />` : html`<${List} />`;
}

async function create() {
  const values = await askedTexts("New model", [
    { name: "name", label: "Name", isRequired: true, hint: "without slashes, not a number" },
    { name: "description", label: "Description" },
    { name: "labels", label: "Labels", hint: "with commas between" },
  ], "Create");
  if (!values) return;
  const name = values.name.trim();
  if (await attempt(() => send("POST", "/api/v1/models", { name, description: values.description, labels: labelsOf(values.labels) })))
    navigate(`/det/models/${encodeURIComponent(name)}`);
}

/** @param {AbortSignal} signal */
async function load(signal) {
  // The protocol has pages; all of them are asked for, as models are few.
  const models = [];
  for (;;) {
    const { models: more, pagination } = await get("/api/v1/models", { offset: models.length, limit: 1000 }, signal);
    models.push(...more);
    if (!more.length || models.length >= pagination.total) return models;
  }
}

function List() {
  const { data, error } = useLive(load, (topic) => topic === "models", []);
  const [text, setText] = useParam("filter");
  const [archived, setArchived] = useParam("archived");
  const rows = useMemo(
    () => filterRows(
      text,
      (data ?? []).filter((/** @type {any} */ row) => archived || !row.archived),
      (row, name) => (name === "label" ? row.labels : name === "user" ? row.username : name === "versions" ? row.numVersions : row[name]),
      (row) => [row.name, row.description, row.username, ...row.labels].join(" "),
    ),
    [data, text, archived],
  );
  const columns = useMemo(
    () => [
      { id: "name", title: "Name", value: (/** @type {any} */ row) => row.name },
      { id: "versions", title: "Versions", isNumber: true, value: (/** @type {any} */ row) => row.numVersions },
      { id: "description", title: "Description", value: (/** @type {any} */ row) => row.description, show: (/** @type {any} */ row) => html`<span title=${row.description}>${row.description}</span>` },
      { id: "labels", title: "Labels", value: (/** @type {any} */ row) => row.labels.join(", "), show: (/** @type {any} */ row) => row.labels.map((/** @type {string} */ label) => html`<span class="label">${label}</span> `) },
      { id: "user", title: "User", value: (/** @type {any} */ row) => row.username },
      { id: "changed", title: "Changed", value: (/** @type {any} */ row) => row.lastUpdatedTime, show: (/** @type {any} */ row) => html`<${Time} at=${row.lastUpdatedTime} />` },
      { id: "created", title: "Created", isHidden: true, value: (/** @type {any} */ row) => row.creationTime, show: (/** @type {any} */ row) => html`<${Time} at=${row.creationTime} />` },
      { id: "archived", title: "Archived", isHidden: !archived, value: (/** @type {any} */ row) => (row.archived ? "archived" : "") },
    ],
    [archived],
  );
  return html`<main>
    <h1 tabindex="-1">Models</h1>
    <${Problem} error=${error} />
    <div class="filters">
      <input type="search" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)} aria-label="Filter" placeholder="Filter: words, label:best, user:ann, versions>2" />
      <label><input type="checkbox" checked=${Boolean(archived)} onChange=${(/** @type {any} */ event) => setArchived(event.target.checked ? "1" : "")} /> archived</label>
      <button class="main" onClick=${create}>New model</button>
    </div>
    ${data === null
      ? !error && html`<p class="loading">Loading …</p>`
      : html`<${Table} name="models" label="Models" columns=${columns} rows=${rows} sort="-changed" href=${(/** @type {any} */ row) => `/det/models/${encodeURIComponent(row.name)}`}
          empty=${data.length ? "No model fits the filter." : html`No models yet. Make one here, or with <code>det model create NAME</code>`} />`}
  </main>`;
}
