// An experiment's config as submitted, and the values in effect with their origins.

import { html } from "htm/preact/standalone";
import { get } from "../../api.js";
import { download } from "../../format.js";
import { useLive } from "../../live.js";
import { Check, Pending } from "../../parts/basics.js";
import { Table } from "../../parts/table.js";
import { useFlag, useParam } from "../../router.js";
import { Lines } from "../../parts/lines.js";

/** @param {{ id: number, experiment: any }} props */
export function Config({ id }) {
  const [shown, setShown] = useParam("config", "submitted");
  const [defaults, setDefaults] = useFlag("defaults");
  const { data, error } = useLive((signal) => get(`/page/experiments/${id}/config`, {}, signal), (topic) => topic === `experiment:${id}`, [id]);
  if (!data) return html`<${Pending} error=${error} />`;
  const isDefault = (/** @type {any} */ row) => row.origin === "default";
  const columns = /** @type {import("../../parts/table.js").Column[]} */ ([
    { id: "key", title: "Key", value: (row) => row.key, show: (row) => html`<code>${row.key}</code>` },
    { id: "value", title: "Value", value: (row) => row.text, show: (row) => html`<code title=${row.text}>${row.text}</code>` },
    { id: "origin", title: "From", value: (row) => row.origin },
  ]);
  const values = data.values.map((/** @type {any} */ row, /** @type {number} */ idx) => ({ ...row, id: idx, text: JSON.stringify(row.value) }));
  const withDefaults = html`<${Check} checked=${defaults} set=${setDefaults}>with defaults<//>`;
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
