// Registers a checkpoint as a version of a model, an existing one or a new one.

import { html, useEffect, useState } from "htm/preact/standalone";
import { get, send } from "../../api.js";
import { asked, Form } from "./dialog.js";

/** @param {string} uuid of a checkpoint @returns {Promise<{ name: string, version: number } | null>} */
export const askForModel = (uuid) => asked((end) => html`<${Register} uuid=${uuid} onEnd=${end} />`);

/** @param {{ uuid: string, onEnd: (done: { name: string, version: number } | null) => void }} props */
function Register({ uuid, onEnd }) {
  const [models, setModels] = useState(/** @type {any[] | null} */ (null));
  const [model, setModel] = useState("");
  const [name, setName] = useState("");
  const [version, setVersion] = useState("");
  const [comment, setComment] = useState("");
  useEffect(() => {
    get("/api/v1/models", { archived: false, sortBy: "SORT_BY_LAST_UPDATED_TIME", orderBy: "ORDER_BY_DESC", limit: 1000 })
      .then((found) => setModels(found.models))
      .catch(() => setModels([]));
  }, []);
  const register = async () => {
    const known = models?.find((one) => String(one.id) === model);
    const target = known ?? (await send("POST", "/api/v1/models", { name: name.trim() })).model;
    if (!known) {
      // A second try, if the version is refused, finds the model that the first has made.
      setModels([target, ...(models ?? [])]);
      setModel(String(target.id));
    }
    const { modelVersion } = await send("POST", `/api/v1/models/${target.id}/versions`, { modelName: target.name, checkpointUuid: uuid, name: version.trim(), comment });
    onEnd({ name: target.name, version: modelVersion.version });
  };
  return html`<${Form} title="Register as a model version" action="Register" onDo=${register} onEnd=${() => onEnd(null)}>
    <p class="muted">Checkpoint ${uuid}</p>
    <label class="field">Model <select value=${model} onChange=${(/** @type {any} */ event) => setModel(event.target.value)}>
      <option value="">a new model</option>
      ${(models ?? []).map((one) => html`<option value=${String(one.id)}>${one.name} (${one.numVersions} ${one.numVersions === 1 ? "version" : "versions"})</option>`)}
    </select></label>
    ${!model && html`<label class="field">Name of the new model <input required value=${name} onInput=${(/** @type {any} */ event) => setName(event.target.value)} /></label>`}
    <label class="field">Name of the version <input value=${version} placeholder="none" onInput=${(/** @type {any} */ event) => setVersion(event.target.value)} /></label>
    <label class="field">Comment <input value=${comment} onInput=${(/** @type {any} */ event) => setComment(event.target.value)} /></label>
  <//>`;
}
