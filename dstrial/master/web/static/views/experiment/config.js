// An experiment's config: as it was submitted, and as it is in effect with where each value comes from.

import { html } from "htm/preact/standalone";
import { get } from "../../api.js";
import { download } from "../../format.js";
import { useLive } from "../../live.js";
import { Problem } from "../../parts/basics.js";
import { Table } from "../../parts/table.js";
import { useParam } from "../../router.js";
import { Lines } from "../../parts/lines.js";

/** @param {{ id: number, experiment: any }} props */
export function Config({ id }) {
  const [shown, setShown] = useParam("config", "submitted");
  const [defaults, setDefaults] = useParam("defaults");
  const { data, error } = useLive((signal) => get(`/page/experiments/${id}/config`, {}, signal), (topic) => topic === `experiment:${id}`, [id]);
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`;
  const isDefault = (/** @type {any} */ row) => row.origin === "default";
  const columns = [
    { id: "key", title: "Key", value: (/** @type {any} */ row) => row.key, show: (/** @type {any} */ row) => html`<code>${row.key}</code>` },
    { id: "value", title: "Value", value: (/** @type {any} */ row) => row.text, show: (/** @type {any} */ row) => html`<code title=${row.text}>${row.text}</code>` },
    { id: "origin", title: "From", value: (/** @type {any} */ row) => row.origin },
  ];
  const values = data.values.map((/** @type {any} */ row, /** @type {number} */ idx) => ({ ...row, id: idx, text: JSON.stringify(row.value) }));
  const withDefaults = html`<label><input type="checkbox" checked=${Boolean(defaults)} onChange=${(/** @type {any} */ event) => setDefaults(event.target.checked ? "1" : "")} /> with defaults</label>`;
  return html`
    <div class="filters" role="radiogroup" aria-label="Which config">
      ${[["submitted", "As submitted"], ["effective", "In effect, with origins"]].map(([one, title]) => html`<label><input type="radio" name="config" checked=${shown === one} onChange=${() => setShown(one)} /> ${title}</label>`)}
    </div>
    ${shown === "submitted" && html`<div class="tools"><button onClick=${() => download(`experiment-${id}.yaml`, data.original, "application/yaml")}>Download</button></div>
      ${data.original.trim() ? html`<${Lines} text=${data.original} label="Submitted config" />` : html`<p class="muted">No config was submitted: its trials were reported from elsewhere.</p>`}
      ${data.template && html`<h2>Template that was laid under it</h2><${Lines} text=${JSON.stringify(data.template, null, 2)} label="Template" />`}`}
    ${shown === "effective" && html`
      ${data.more && html`<p class="muted">The first ${values.length} values are listed.</p>`}
      <${Table} name="values" label="Values of the experiment config" rows=${defaults ? values : values.filter((/** @type {any} */ row) => !isDefault(row))} columns=${columns} tools=${withDefaults} empty="Everything is the default." />`}`;
}
