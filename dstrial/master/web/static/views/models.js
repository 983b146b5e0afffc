// The model registry: a table of models.

import { html, useMemo } from "htm/preact/standalone";
import { getAll, send } from "../api.js";
import { useLive } from "../live.js";
import { attempt, Check, Problem, SearchField } from "../parts/basics.js";
import { filterRows } from "../parts/filter.js";
import { askTexts, labelsOf } from "../parts/dialog.js";
import { Table, timeColumn } from "../parts/table.js";
import { navigate, useFlag, useParam } from "../router.js";
import { Model } from "./models/model.js";

/** @param {{ words: string[] }} props */
export function Models({ words }) {
  return words[1] ? html`<${Model} name=${words[1]} />` : html`<${List} />`;
}

async function create() {
  const values = await askTexts("New model", [
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
const load = async (signal) => (await getAll("/api/v1/models", "models", signal)).items;

function List() {
  const { data, error } = useLive(load, (topic) => topic === "models", []);
  const [text, setText] = useParam("filter");
  const [archived, setArchived] = useFlag("archived");
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
    () => /** @type {import("../parts/table.js").Column[]} */ ([
      { id: "name", title: "Name", value: (row) => row.name },
      { id: "versions", title: "Versions", isNumber: true, value: (row) => row.numVersions },
      { id: "description", title: "Description", value: (row) => row.description, show: (row) => html`<span title=${row.description}>${row.description}</span>` },
      { id: "labels", title: "Labels", value: (row) => row.labels.join(", "), show: (row) => row.labels.map((/** @type {string} */ label) => html`<span class="label">${label}</span> `) },
      { id: "user", title: "User", value: (row) => row.username },
      timeColumn("changed", "Changed", "lastUpdatedTime"),
      timeColumn("created", "Created", "creationTime", { isHidden: true }),
      { id: "archived", title: "Archived", isHidden: !archived, value: (row) => (row.archived ? "archived" : "") },
    ]),
    [archived],
  );
  return html`<main>
    <h1 tabindex="-1">Models</h1>
    <${Problem} error=${error} />
    <div class="filters">
      <${SearchField} text=${text} set=${setText} label="Filter" placeholder="Filter: words, label:best, user:ann, versions>2" />
      <${Check} checked=${archived} set=${setArchived}>archived<//>
      <button class="main" onClick=${create}>New model</button>
    </div>
    ${data === null
      ? !error && html`<p class="loading">Loading …</p>`
      : html`<${Table} name="models" label="Models" columns=${columns} rows=${rows} sort="-changed" href=${(/** @type {any} */ row) => `/det/models/${encodeURIComponent(row.name)}`}
          empty=${data.length ? "No model fits the filter." : html`No models yet. Make one here, or with <code>det model create NAME</code>`} />`}
  </main>`;
}
