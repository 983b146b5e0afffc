// Actions on one experiment only: edit, fork, continue, open TensorBoard.

import { html, useState } from "htm/preact/standalone";
import { isEnded } from "../../actions.js";
import { send } from "../../api.js";
import { attempt, Check, notice } from "../../parts/basics.js";
import { navigate } from "../../router.js";
import { askTexts, editFields, Form, labelsOf, openDialog } from "../../parts/dialog.js";

/** Edit an experiment's name, description, labels and notes. @param {any} experiment @param {() => void} reload */
async function edit(experiment, reload) {
  const values = await askTexts(`Edit experiment ${experiment.id}`, editFields(experiment), "Save");
  if (!values) return;
  await attempt(() => send("PATCH", `/api/v1/experiments/${experiment.id}`, { ...values, labels: labelsOf(values.labels) }), `saved: experiment ${experiment.id}`);
  reload();
}

/** Start a TensorBoard of an experiment, and open it in a new window. @param {number} id */
async function openBoard(id) {
  const opened = window.open("", "_blank");
  if (opened) opened.opener = null;
  const isDone = await attempt(async () => {
    const { tensorboard } = await send("POST", "/api/v1/tensorboards", { experimentIds: [id] });
    if (opened) opened.location.href = tensorboard.serviceAddress;
  }, "TensorBoard: its task is under Tasks");
  if (!isDone) opened?.close();
}

/** @param {{ id: number, experiment: any, reload: () => void }} props */
export function HeadActions({ id, experiment, reload }) {
  const fork = async () => {
    const forkId = /** @type {number | null} */ (await openDialog((end) => html`<${Fork} id=${id} experiment=${experiment} onEnd=${end} />`));
    if (forkId) navigate(`/det/experiments/${forkId}/overview`);
  };
  const continueIt = async () => {
    if (!(await openDialog((end) => html`<${Continue} id=${id} experiment=${experiment} onEnd=${end} />`))) return;
    notice(`experiment ${id} goes on`);
    reload();
  };
  return html`<button onClick=${() => edit(experiment, reload)}>Edit …</button>
    ${!experiment.unmanaged && html`<button onClick=${fork}>Fork …</button>
      ${isEnded(experiment) && html`<button onClick=${continueIt}>Continue …</button>`}
      <button onClick=${() => openBoard(id)}>TensorBoard</button>`}`;
}

/** @param {{ id: number, experiment: any, onEnd: (forkId: number | null) => void }} props */
function Fork({ id, experiment, onEnd }) {
  const [text, setText] = useState(/** @type {string} */ (experiment.originalConfig || JSON.stringify(experiment.config, null, 2)));
  const [isActive, setActive] = useState(true);
  const [checked, setChecked] = useState("");
  const body = (/** @type {object} */ more) => ({ config: text, parentId: id, projectId: experiment.projectId, activate: isActive, ...more });
  const submit = async () => {
    setChecked("");
    const { experiment: made, warnings = [] } = await send("POST", "/api/v1/experiments", body({}));
    if (warnings.length) notice("It needs more slots than there are now, and waits for them.");
    onEnd(made.id);
  };
  const check = async () => {
    setChecked("checking …");
    try {
      const { warnings = [] } = await send("POST", "/api/v1/experiments", body({ validateOnly: true }));
      setChecked(warnings.length ? "The config is valid; it needs more slots than there are now." : "The config is valid.");
    } catch (error) {
      setChecked(/** @type {Error} */ (error).message);
    }
  };
  return html`<${Form} kind="wide" title=${`Fork experiment ${id}`} action="Submit" onDo=${submit} onEnd=${() => onEnd(null)} tools=${html`<button type="button" onClick=${check}>Check only</button>`}>
    <p class="muted">A new experiment with the same code and this config. Masked secrets are taken from experiment ${id}.</p>
    <label class="field">Config (YAML) <textarea class="yaml" spellcheck=${false} rows="18" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)}></textarea></label>
    <${Check} checked=${isActive} set=${setActive}>start it at once<//>
    ${checked && html`<pre role="status">${checked}</pre>`}
  <//>`;
}

/** @param {{ id: number, experiment: any, onEnd: (done: boolean | null) => void }} props */
function Continue({ id, experiment, onEnd }) {
  const [text, setText] = useState("");
  const go = async () => {
    await send("POST", "/api/v1/experiments/continue", { id, overrideConfig: text.trim() ? text : "{}\n" });
    onEnd(true);
  };
  return html`<${Form} kind="wide" title=${`Continue experiment ${id}`} action="Continue" onDo=${go} onEnd=${() => onEnd(null)}>
    <p>Trials that did not complete go on from their latest checkpoints${experiment.searcher === "single" ? "; a single trial goes on even if it had completed, with another length for example" : ""}.</p>
    <label class="field">Changes to the config (YAML, may be empty) <textarea class="yaml" spellcheck=${false} rows="6" placeholder="searcher:\n  max_length: {batches: 2000}" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)}></textarea></label>
  <//>`;
}
