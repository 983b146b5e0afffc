// What can be done with one experiment beside what can be done with many: fork, continue, TensorBoard, priority, another project.

import { html, useEffect, useState } from "htm/preact/standalone";
import { isEnded } from "../../actions.js";
import { get, send } from "../../api.js";
import { useLive } from "../../live.js";
import { attempt, notice, Problem } from "../../parts/basics.js";
import { navigate } from "../../router.js";
import { asked, Form } from "../../parts/dialog.js";

/** @param {{ id: number, experiment: any, reload: () => void }} props */
export function HeadActions({ id, experiment, reload }) {
  const [isBoard, setBoard] = useState(false);
  const ask = async (/** @type {any} */ Dialog, /** @type {string} */ done) => {
    if (await asked((end) => html`<${Dialog} id=${id} experiment=${experiment} onEnd=${end} />`)) {
      notice(done);
      reload();
    }
  };
  const fork = async () => {
    const made = /** @type {number | null} */ (await asked((end) => html`<${Fork} id=${id} experiment=${experiment} onEnd=${end} />`));
    if (made) navigate(`/det/experiments/${made}/overview`);
  };
  if (experiment.unmanaged) return html`<button onClick=${() => ask(Move, `experiment ${id}: moved`)}>Move …</button>`;
  return html`
    <button onClick=${fork}>Fork …</button>
    ${isEnded(experiment) && html`<button onClick=${() => ask(Continue, `experiment ${id} goes on`)}>Continue …</button>`}
    <button aria-expanded=${isBoard} onClick=${() => setBoard(!isBoard)}>TensorBoard</button>
    ${!isEnded(experiment) && html`<button onClick=${() => ask(Priority, `experiment ${id}: priority changed`)}>Priority ${experiment.priority} …</button>`}
    <button onClick=${() => ask(Move, `experiment ${id}: moved`)}>Move …</button>
    ${isBoard && html`<${Board} id=${id} />`}`;
}

/** @param {{ id: number, experiment: any, onEnd: (made: number | null) => void }} props */
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
    <label><input type="checkbox" checked=${isActive} onChange=${(/** @type {any} */ event) => setActive(event.target.checked)} /> start it at once</label>
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

/** @param {{ id: number, experiment: any, onEnd: (done: boolean | null) => void }} props */
function Priority({ id, experiment, onEnd }) {
  const [priority, setPriority] = useState(String(experiment.priority));
  const change = async () => {
    await send("PATCH", `/api/v1/experiments/${id}`, { resources: { priority: Number(priority) } });
    onEnd(true);
  };
  return html`<${Form} title=${`Priority of experiment ${id}`} action="Set" onDo=${change} onEnd=${() => onEnd(null)}>
    <label class="field">Priority, 1 is the most urgent, 99 the least <input type="number" min="1" max="99" required value=${priority} onInput=${(/** @type {any} */ event) => setPriority(event.target.value)} /></label>
  <//>`;
}

/** @returns {Promise<{ id: number, name: string, workspace: string }[]>} projects that take experiments */
async function openProjects() {
  const { workspaces } = await get("/api/v1/workspaces", { archived: false });
  const lists = await Promise.all(
    workspaces.map(async (/** @type {any} */ workspace) => {
      const { projects } = await get(`/api/v1/workspaces/${workspace.id}/projects`, { archived: false });
      return projects.map((/** @type {any} */ project) => ({ id: project.id, name: project.name, workspace: workspace.name }));
    }),
  );
  return lists.flat();
}

/** @param {{ id: number, experiment: any, onEnd: (done: boolean | null) => void }} props */
function Move({ id, experiment, onEnd }) {
  const [projects, setProjects] = useState(/** @type {{ id: number, name: string, workspace: string }[] | null} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const [target, setTarget] = useState("");
  useEffect(() => {
    openProjects().then((found) => setProjects(found.filter((project) => project.id !== experiment.projectId)), setError);
  }, []);
  const move = async () => {
    await send("POST", `/api/v1/experiments/${id}/move`, { destinationProjectId: Number(target) });
    onEnd(true);
  };
  return html`<${Form} title=${`Move experiment ${id}`} action="Move" onDo=${move} onEnd=${() => onEnd(null)}>
    <p>It is in ${experiment.workspace} / ${experiment.project}.</p>
    <${Problem} error=${error} />
    ${projects && !projects.length && html`<p class="muted">There is no other project. <code>det project create WORKSPACE NAME</code> makes one.</p>`}
    <label class="field">To <select required value=${target} onChange=${(/** @type {any} */ event) => setTarget(event.target.value)}>
      <option value="">choose a project</option>
      ${(projects ?? []).map((project) => html`<option value=${String(project.id)}>${project.workspace} / ${project.name}</option>`)}
    </select></label>
  <//>`;
}

/** The TensorBoard of an experiment: started here, with the way to it once it answers. @param {{ id: number }} props */
function Board({ id }) {
  const { data, error, reload } = useLive(
    async (signal) => {
      const { tensorboards } = await get("/api/v1/tensorboards", { orderBy: "ORDER_BY_DESC" }, signal);
      const own = tensorboards.find((/** @type {any} */ one) => one.experimentIds.length === 1 && one.experimentIds[0] === id && !one.trialIds.length && one.state !== "STATE_TERMINATED");
      if (!own) return { own: null, isReady: false };
      const { task } = await get(`/api/v1/tasks/${own.id}`, {}, signal);
      return { own, isReady: task.allocations.some((/** @type {any} */ allocation) => allocation.isReady) };
    },
    (topic) => topic.startsWith("command:"),
    [id],
  );
  if (!data) return html`<span class="muted">${error ? html`<${Problem} error=${error} />` : "Loading …"}</span>`;
  const start = () => attempt(() => send("POST", "/api/v1/tensorboards", { experimentIds: [id] }), "TensorBoard: asked for").then(reload);
  const stop = () => attempt(() => send("POST", `/api/v1/tensorboards/${data.own.id}/kill`), "TensorBoard: stopped").then(reload);
  if (!data.own) return html`<span class="board"><button onClick=${start}>Start a TensorBoard of experiment ${id}</button></span>`;
  return html`<span class="board" role="status">
    ${data.isReady ? html`<a href=${data.own.serviceAddress} target="_blank" rel="noopener">Open TensorBoard</a>` : html`<span class="muted">TensorBoard is starting, or waits …</span>`}
    <button onClick=${stop}>Stop TensorBoard</button></span>`;
}
