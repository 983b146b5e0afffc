// The files with which an experiment was submitted, or a diff of its config and code from another experiment.

import { html } from "htm/preact/standalone";
import { get } from "../../api.js";
import { bytes, download } from "../../format.js";
import { useLive } from "../../live.js";
import { Pending } from "../../parts/basics.js";
import { setParams, useLocation, useParam } from "../../router.js";
import { Difference, Lines } from "../../parts/lines.js";

/** @param {{ id: number, experiment: any }} props */
export function Code({ id, experiment }) {
  const [against] = useParam("against");
  const other = Number(against) || 0;
  const { data, error } = useLive((signal) => get(`/page/experiments/${id}/files`, {}, signal), () => false, [id]);
  if (!data) return html`<${Pending} error=${error} />`;
  const compare = (/** @type {string} */ to) => setParams({ against: to });
  return html`
    <div class="filters">
      <label>Compare with experiment <input type="number" min="1" class="short" value=${against} onChange=${(/** @type {any} */ event) => compare(event.target.value)} /></label>
      ${experiment.parent && experiment.parent !== other && html`<button type="button" onClick=${() => compare(String(experiment.parent))}>with its parent ${experiment.parent}</button>`}
      ${other > 0 && html`<button type="button" onClick=${() => compare("")}>No comparison</button>`}
    </div>
    ${data.more && html`<p class="muted">There are more files than are listed.</p>`}
    ${other > 0
      ? html`<h2>Configs</h2><${Difference} id=${id} other=${other} kind="effective" /><h2>Code</h2><${Difference} id=${id} other=${other} kind="code" />`
      : data.files.length
        ? html`<${Files} id=${id} paths=${data.files.map((/** @type {any} */ file) => file.path)} />`
        : html`<p class="muted">${experiment.unmanaged ? "Its trials were reported from elsewhere; there is no code here." : "It was submitted without files: what it runs is installed where its trials run."}</p>`}`;
}

/** The list of files beside the chosen file. @param {{ id: number, paths: string[] }} props */
function Files({ id, paths }) {
  const [chosen] = useParam("file");
  const path = chosen || (paths.find((one) => /(^|\/)(model_def|train)\.py$/.test(one)) ?? paths[0]);
  return html`<div class="files"><nav aria-label="Files"><${Tree} paths=${paths} now=${path} /></nav>
    <div class="file"><${FileText} key=${path} id=${id} path=${path} /></div></div>`;
}

/** Files by directory. @param {{ paths: string[], now: string }} props `now` is the chosen file */
function Tree({ paths, now }) {
  const { path, query } = useLocation();
  /** @type {Map<string, string[]>} */
  const folders = new Map();
  for (const one of paths) {
    const folder = one.includes("/") ? one.slice(0, one.lastIndexOf("/")) : "";
    folders.set(folder, [...(folders.get(folder) ?? []), one]);
  }
  /** @param {string} file */
  const to = (file) => {
    const words = new URLSearchParams(query);
    words.set("file", file);
    return `/${path.map(encodeURIComponent).join("/")}?${words}`;
  };
  const list = (/** @type {string[]} */ some) => html`<ul>${some.map((one) => html`<li><a href=${to(one)} aria-current=${one === now ? "true" : undefined}>${one.slice(one.lastIndexOf("/") + 1)}</a></li>`)}</ul>`;
  return html`${folders.has("") && list(/** @type {string[]} */ (folders.get("")))}
    ${[...folders].filter(([folder]) => folder).sort(([a], [b]) => a.localeCompare(b)).map(([folder, some]) => html`<details open=${folders.size < 40 || now.startsWith(`${folder}/`)}><summary>${folder}/</summary>${list(some)}</details>`)}`;
}

/** @param {{ id: number, path: string }} props */
function FileText({ id, path }) {
  const { data, error } = useLive((signal) => get(`/page/experiments/${id}/file`, { path }, signal), () => false, [id, path]);
  if (!data) return html`<${Pending} error=${error} />`;
  return html`<h2>${path} <span class="muted">${bytes(data.bytes)}</span></h2>
    ${!data.isBinary && !data.isCut && html`<div class="tools"><button onClick=${() => download(path.slice(path.lastIndexOf("/") + 1), data.text, "text/plain")}>Download</button></div>`}
    ${data.isBinary && html`<p class="muted">It is no text: ${bytes(data.bytes)}.</p>`}
    ${data.isCut && html`<p class="muted">Its beginning is shown; \`det experiment download-model-def ${id} DIRECTORY\` has all.</p>`}
    ${!data.isBinary && (data.text ? html`<${Lines} text=${data.text} label=${path} />` : html`<p class="muted">The file is empty.</p>`)}`;
}
