// The configs and the code of two experiments, with what differs between them marked.

import { html } from "htm/preact/standalone";
import { Difference } from "../../parts/lines.js";
import { useParam } from "../../router.js";
import { FilesCompared } from "../experiment/code.js";

/** @param {{ experiments: any[] }} props */
export function ConfigDiff({ experiments }) {
  const [first, setFirst] = useParam("config_a", String(experiments[0]?.id ?? ""));
  const [second, setSecond] = useParam("config_b", String(experiments[1]?.id ?? ""));
  const [kind, setKind] = useParam("configs", "effective");
  if (experiments.length < 2) return experiments.length ? html`<h2>Configs</h2><p class="muted">All trials are of one experiment, and have one config.</p>` : null;
  const find = (/** @type {string} */ id) => experiments.find((one) => String(one.id) === id) ?? experiments[0];
  const [a, b] = [find(first), find(second)];
  const choices = experiments.map((one) => html`<option value=${String(one.id)}>${one.name} (${one.id})</option>`);
  const text = (/** @type {any} */ one) => (kind === "effective" ? one.config : one.originalConfig);
  return html`<h2>Configs</h2>
    <div class="filters">
      <label>First <select value=${String(a.id)} onChange=${(/** @type {any} */ event) => setFirst(event.target.value)}>${choices}</select></label>
      <label>Second <select value=${String(b.id)} onChange=${(/** @type {any} */ event) => setSecond(event.target.value)}>${choices}</select></label>
      <label>As <select value=${kind} onChange=${(/** @type {any} */ event) => setKind(event.target.value)}><option value="effective">in effect</option><option value="original">submitted</option></select></label>
    </div>
    <${Difference} before=${text(a)} after=${text(b)} label=${`Config of experiment ${a.id} and of ${b.id}`} />
    <h2>Code</h2>
    ${a.id === b.id ? html`<p class="muted">Choose two experiments.</p>` : html`<${FilesCompared} key=${`${a.id} ${b.id}`} id=${b.id} other=${a.id} />`}`;
}
